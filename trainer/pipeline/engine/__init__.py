"""Executors of a lowered schedule."""

"""Flat-bucket AdamW with ZeRO stage 0 and 1."""

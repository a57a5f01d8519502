"""Tensor-parallel building blocks, injected into models by `factory.LayerFactory`."""

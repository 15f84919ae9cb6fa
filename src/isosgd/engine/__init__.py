"""Backends that execute the steps of chains."""

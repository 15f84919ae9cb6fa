"""Posteriors with known moments; ``python -m experiments.posteriors`` runs methods on them."""

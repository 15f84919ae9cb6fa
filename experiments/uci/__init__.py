"""Regressions on the published UCI splits; ``python -m experiments.uci`` runs them."""

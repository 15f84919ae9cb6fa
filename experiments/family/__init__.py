"""Every method on posteriors that are known; ``python -m experiments.family`` runs them."""

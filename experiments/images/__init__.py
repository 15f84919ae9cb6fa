"""Classification of MNIST and CIFAR-10; ``python -m experiments.images mnist`` runs it."""

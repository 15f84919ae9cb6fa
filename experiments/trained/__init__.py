"""Trained networks before and after `isosgd.sample`: is the average of the draws ever worse than the start?

    python -m experiments.trained --list test --data-root DIR --device cuda --out results/trained

Two lists of pairs of a network and data, fixed on 17 November 2026, before any default was chosen with them.

TUNE: pairs on which defaults may be chosen, by their held-out data.
    wine-mlp, cancer-mlp (scikit-learn), notmnist-cnn, mnist5k-mlp, kin-mlp (a made-up robot arm), diabetes-mlp,
    boston-mlp, notmnist-bn, notmnist-overfitted, letters-mlp, notmnist-gn, notmnist-transformer, notmnist-undertrained,
    and cifar10k-vgg, cifar40k-vgg and cifar20k-resnet56 on a GPU. Those of MNIST and
    CIFAR-10 take images of the training files alone, so that no test image of the other list is ever looked at.

TEST: pairs that nothing is chosen with.
    digits-mlp, fashion-bn, fashion-gn (with dropout), mnist-lenet5, mnist-transformer, concrete-mlp, yacht-mlp,
    wine-red-mlp, airfoil-mlp, cifar10-resnet18 and cifar10-vgg16 on a GPU, mnist-overfitted, fashion-undertrained.

Tables are split anew for every seed. Image sets are split by a fixed seed: of Fashion-MNIST only the file of 10,000
test images is used, 7,000 to train on, 1,000 held out, 2,000 to test. `experiments.trained.pairs` has the recipes.
"""

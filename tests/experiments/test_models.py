"""The networks: published parameter counts, first weights, dropout, and that torch.func can work with them."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from experiments.models import FilterResponseNorm, lenet5, mlp, resnet18, resnet20_frn, resnet56, vgg16_bn

pytestmark = pytest.mark.long
IMAGE_NETS = {f.__name__: f for f in (lenet5, resnet18, resnet56, resnet20_frn, vgg16_bn)}
SMALL = ["lenet5", "resnet56", "resnet20_frn"]  # the others are made of the same parts, and take seconds


def images(name: str, n: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    return torch.randn(n, *shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "count", "layers"),
    [
        ("lenet5", 431_080, (2, 2)),
        ("resnet18", 11_173_962, (17, 1)),
        ("resnet56", 853_018, (55, 1)),
        ("resnet20_frn", 269_722, (19, 1)),
        ("vgg16_bn", 14_724_042, (13, 1)),
    ],
)
def test_published_counts_outputs_and_first_weights(name, count, layers):
    """Weights: standard deviation sqrt(2 / fan-in), the last layer sqrt(1 / fan-in), within five standard errors."""
    net = IMAGE_NETS[name]().eval()
    assert sum(p.numel() for p in net.parameters()) == count
    out = net(images(name))
    assert out.shape == (2, 10) and bool(out.isfinite().all())
    weighted = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    convolutions = sum(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in weighted)
    assert (convolutions, sum(isinstance(m, nn.Linear) for m in weighted)) == layers
    assert not any(getattr(m, "inplace", False) for m in net.modules())
    for layer in weighted:
        size, fan_in = layer.weight.numel(), layer.weight[0].numel()
        share = layer.weight.detach().square().mean() * fan_in / (1 if layer is weighted[-1] else 2)
        assert abs(float(share) - 1) < 5 * math.sqrt(2 / size)
        assert layer.bias is None or not bool(layer.bias.any())


@pytest.mark.parametrize("name", SMALL)
def test_another_number_of_classes(name):
    assert IMAGE_NETS[name](classes=7).eval()(images(name)).shape == (2, 7)


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_network(name):
    nets = []
    for _ in range(2):
        torch.manual_seed(5)
        nets.append(IMAGE_NETS[name]().state_dict())
    assert all(torch.equal(nets[0][key], nets[1][key]) for key in nets[0])


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_changes_nothing(name):
    net, x = IMAGE_NETS[name]().double().eval(), images(name, dtype=torch.float64)
    expected = net(x)
    found = net.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_func_gradients_are_those_of_backward(name):
    net, x = IMAGE_NETS[name]().double().eval(), images(name, dtype=torch.float64)
    params = {key: p.detach() for key, p in net.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(net, values, (x,)).square().mean()

    found = grad(loss)(params)
    net(x).square().mean().backward()
    for key, p in net.named_parameters():
        assert torch.allclose(found[key], p.grad, rtol=1e-7, atol=1e-10), key


@pytest.mark.parametrize("name", ["lenet5", "resnet20_frn"])
def test_chains_can_be_batched(name):
    """vmap over two sets of parameters gives what each gives alone."""
    nets = [IMAGE_NETS[name]().double().eval() for _ in range(2)]
    x = images(name, dtype=torch.float64)
    stacked = {key: torch.stack([n.state_dict()[key] for n in nets]) for key, _ in nets[0].named_parameters()}
    found = vmap(lambda params: functional_call(nets[0], params, (x,)))(stacked)
    assert torch.allclose(found, torch.stack([net(x) for net in nets]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [*SMALL, "vgg16_bn"])
def test_dropout_is_random_in_training_only_and_keeps_names(name):
    net, plain = IMAGE_NETS[name](dropout=0.2), IMAGE_NETS[name]()
    plain.load_state_dict(net.state_dict())
    x = images(name)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # what is random now is dropout alone
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), plain.eval()(x))
    assert not any(isinstance(m, nn.Dropout) for m in plain.modules())


def test_examples_of_the_frn_network_do_not_touch_each_other():
    """In training mode too: this is what BatchNorm cannot give, and what a likelihood needs."""
    net, x = resnet20_frn().double().train(), images("resnet20_frn", 4, torch.float64)
    assert torch.allclose(net(x)[:2], net(x[:2]), atol=1e-10)
    batch_norm = resnet56().double().train()
    assert not torch.allclose(batch_norm(x)[:2], batch_norm(x[:2]), atol=1e-3)


def test_filter_response_normalisation():
    layer, x = FilterResponseNorm(3), torch.randn(2, 3, 5, 5) * 40
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        layer.bias.copy_(torch.tensor([0.0, -1.0, 5.0]))
    for i in range(2):
        for c in range(3):
            expected = x[i, c] / math.sqrt(float((x[i, c] ** 2).mean()) + 1e-6) * (c + 1) + [0.0, -1.0, 5.0][c]
            assert torch.allclose(layer(x)[i, c], expected, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    assert bool(layer(torch.zeros(1, 3, 2, 2).double()).isfinite().all())


def test_option_a_shortcut_has_no_parameters_and_pads_with_zeros():
    shortcut = resnet56().stages[1][0].shortcut
    x = torch.randn(2, 16, 32, 32)
    out = shortcut(x)
    assert list(shortcut.parameters()) == []
    assert out.shape == (2, 32, 16, 16)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not bool(out[:, 16:].any())


def test_bfloat16_autocast():
    for name in ("lenet5", "resnet20_frn"):
        with torch.autocast("cpu", torch.bfloat16):
            assert bool(IMAGE_NETS[name]()(images(name)).isfinite().all())


# Fully connected


def test_mlp_layers():
    net = mlp(6, (50, 20), 2, "tanh", dropout=0.1)
    assert [type(m).__name__ for m in net] == ["Linear", "Tanh", "Dropout", "Linear", "Tanh", "Dropout", "Linear"]
    assert net(torch.randn(5, 6)).shape == (5, 2)
    assert [p.shape for p in mlp(6, 50, 1).parameters()] == [(50, 6), (50,), (1, 50), (1,)]
    assert len(mlp(6, (), 1)) == 1


@pytest.mark.parametrize(("activation", "gain"), [("relu", 2.0), ("tanh", 1.0), ("silu", 2.0), ("gelu", 2.0)])
def test_mlp_weights(activation, gain):
    net = mlp(200, (200, 200), 200, activation)
    for layer, expected in zip([m for m in net if isinstance(m, nn.Linear)], (gain, gain, 1.0), strict=True):
        assert abs(float(layer.weight.detach().square().mean()) * 200 / expected - 1) < 5 * math.sqrt(2 / 40_000)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: mlp(0, 50, 1), "in_features = 0"),
        (lambda: mlp(3, 50, 1.0), "out_features = 1.0"),
        (lambda: mlp(3, (50, -1), 1), "hidden = -1"),
        (lambda: mlp(3, 5.0, 1), "hidden = 5.0"),
        (lambda: mlp(3, "50", 1), "hidden = '5'"),
        (lambda: mlp(3, 50, 1, "sigmoid"), "activation = 'sigmoid'"),
        (lambda: mlp(3, 50, 1, dropout=1.0), "dropout = 1.0"),
        *((lambda f=f: f(dropout=-0.1), "dropout = -0.1") for f in IMAGE_NETS.values()),
        *((lambda f=f: f(classes=0), "classes = 0") for f in IMAGE_NETS.values()),
    ],
)
def test_bad_arguments_are_named(make, fault):
    with pytest.raises(ValueError, match=fault):
        make()

import pytest
import torch
import torch.nn.functional as F

from clearhead.nn.blocks import ACTIVATIONS, MLP


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_its_formula(name):
    net = MLP(4, 7, ACTIVATIONS[name], out_features=3)
    for linear in (net.fc1, net.fc2):
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(2, 5, 4)
    hidden = x @ net.fc1.weight.T + net.fc1.bias
    hidden = {"relu": hidden.clamp(min=0), "gelu": hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))}[name]
    torch.testing.assert_close(net(x), hidden @ net.fc2.weight.T + net.fc2.bias)
    assert net(x).shape == (2, 5, 3)


def test_it_equals_two_convolutions_of_kernel_one():
    """R4.13: the same net at each position."""
    net = MLP(4, 7, F.relu)
    x = torch.randn(2, 5, 4)
    hidden = F.conv1d(x.mT, net.fc1.weight[..., None], net.fc1.bias).relu()
    torch.testing.assert_close(net(x), F.conv1d(hidden, net.fc2.weight[..., None], net.fc2.bias).mT)


def test_positions_do_not_see_each_other():
    net, x = MLP(4, 7), torch.randn(1, 5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x)[0, 2].sum(), x)
    assert gradient[0].any(-1).tolist() == [False, False, True, False, False]


def test_dropout_acts_in_training_alone_and_bias_may_be_left_out():
    net, x = MLP(4, 64, dropout=0.5, bias=False), torch.randn(1, 5, 4)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
    assert (net(torch.zeros(1, 4)) == 0).all()
    assert [name for name, _ in net.named_parameters()] == ["fc1.weight", "fc2.weight"]


def test_dropout_stands_between_the_two_layers():
    net = MLP(4, 10, F.relu, dropout=0.5, out_features=1)
    for linear, weight, bias in [(net.fc1, 0.0, 1.0), (net.fc2, 1.0, 0.0)]:  # ten hidden ones, summed
        torch.nn.init.constant_(linear.weight, weight)
        torch.nn.init.constant_(linear.bias, bias)
    out = net(torch.zeros(2000, 4))
    assert set(out.flatten().tolist()) <= set(range(0, 21, 2)), "each hidden one is dropped, or kept and doubled"
    assert len(out.unique()) > 5, "each for itself"
    assert abs(out.mean() - 10) < 0.4


@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu])
def test_without_gradients_it_answers_the_same_and_leaves_x_alone(activation):
    net, x = MLP(4, 8, activation), torch.randn(2, 3, 4)
    before = x.clone()
    expected = net(x)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
        assert torch.equal(x, before)


def test_a_hook_keeps_what_it_saw():
    """The activation works in place where it may; not on what somebody looks at."""
    net, x, seen = MLP(4, 8), torch.randn(2, 3, 4), []
    net.fc1.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        net(x)
        assert torch.equal(seen[0], F.linear(x, net.fc1.weight, net.fc1.bias))


def test_a_norm_stands_between_the_first_layer_and_the_activation():
    norm = torch.nn.LayerNorm(7)
    torch.nn.init.normal_(norm.weight)
    net, x = MLP(4, 7, F.relu, out_features=3, norm=norm), torch.randn(2, 5, 4)
    expected = net.fc2(F.relu(F.layer_norm(net.fc1(x), (7,), norm.weight, norm.bias)))
    torch.testing.assert_close(net(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
    assert "norm" not in dict(MLP(4, 7).named_modules())

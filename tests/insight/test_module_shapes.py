"""module_shapes of any nn.Module equal a real forward pass, with parameter counts and multiply-adds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead.insight.module_shapes import module_shapes
from clearhead.models.shapes import as_text


class Block(nn.Module):
    """A common style: one matrix for q, k and v, and keyword arguments for the fused kernel."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        x += self.mlp(self.ln2(x))
        return x


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 16), nn.Parameter(torch.zeros(1, 9, 16))
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(3))
        self.ln, self.head, self.never = nn.LayerNorm(16), nn.Linear(16, 11, bias=False), nn.Linear(2, 2)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.ln(x)), "loss": None}


class ManualProducts(nn.Module):
    """einsum, matmul and bmm products, and a multiplied parameter."""

    def __init__(self):
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(2, 8, 4)), nn.Parameter(torch.randn(8, 8))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q = torch.einsum("ble,hed->bhld", x, self.w)
        weights = (q @ q.mT).softmax(-1)
        z = torch.bmm(weights.flatten(0, 1), q.flatten(0, 1)).unflatten(0, q.shape[:2])
        return torch.matmul(input=z.transpose(1, 2).flatten(2), other=self.o) * self.gain


def forward_hook_shapes(model, *inputs):
    outputs = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.register_forward_hook(lambda _, args, out, name=name: outputs.update({name: tuple(out.shape)}))
    model.eval()(*inputs)
    return outputs


def test_shapes_of_a_custom_gpt():
    model = GPT()
    shapes = module_shapes(model, batch=2, length=5)
    assert shapes["idx"].rows == (2, 5)
    assert shapes["blocks.2.q_per_head"].rows == (2, 5, 4, 4)
    assert shapes["blocks.2.weights"].rows == (2, 4, 5, 5)
    assert shapes["never.weight"].operation == "not used in this pass"
    outputs = forward_hook_shapes(model, torch.zeros(2, 5, dtype=torch.long))
    assert len(outputs) > 10
    assert {name: shapes[name].rows for name in outputs} == outputs
    assert sum(tensor.parameters for tensor in shapes.tensors) == sum(p.numel() for p in model.parameters())


def test_equal_blocks_of_a_custom_model_are_folded():
    text = as_text(module_shapes(GPT()).table())
    assert "blocks.1-2: same as above" in text
    assert text.count("qkv.weight") == 1


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.again, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.again(F.relu(F.max_pool2d(self.conv(x), 3, stride=2, padding=1)))
        return self.head(x.flatten(2).transpose(1, 2).mean(1))


def test_pooling_and_mean_operations_are_named():
    shapes = module_shapes(ConvNet(), sizes=[(2, 3, 8, 8)])
    assert (shapes["max_pool2d"].operation, shapes["max_pool2d"].rows) == ("max pooling", (2, 8, 4, 4))
    assert shapes["relu"].rows == (2, 8, 4, 4)
    assert (shapes["head.input"].operation, shapes["head.input"].rows) == ("mean", (2, 8))
    stem = module_shapes(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)), sizes=[(2, 3, 8, 8)]
    )
    assert stem["1.max_pool2d"].operation == "max pooling"
    assert stem["2"].rows == (2, 72)


def test_multiply_adds_are_half_of_torch_flop_counter():
    for model, size in ((ManualProducts(), (2, 5, 8)), (nn.Conv1d(3, 4, 2), (2, 3, 7)), (nn.Linear(3, 4), (2, 3))):
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(size))
        shapes = module_shapes(model, sizes=[size])
        assert 2 * shapes.multiply_adds == counter.get_total_flops() > 0
        assert sum(tensor.parameters for tensor in shapes.tensors) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_shapes_of_torch_multihead_attention(batch_first, need_weights):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=need_weights)[0]

    model = Layer()
    shapes = module_shapes(model, sizes=[(3, 5, 8) if batch_first else (5, 3, 8)])
    assert shapes["attn.weights"].rows == (3, 2, 5, 5)
    assert shapes["attn.q_per_head"].rows == (3, 5, 2, 4)
    assert shapes["attn.out_proj"].rows == (3, 5, 8)
    assert sum(tensor.parameters for tensor in shapes.tensors) == sum(p.numel() for p in model.parameters())
    L, B, E = 5, 3, 8
    assert shapes.multiply_adds == B * (4 * L * E * E + 2 * L * L * E)


def test_shapes_of_torch_transformer_stacks():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    shapes = module_shapes(encoder, batch=4)
    assert shapes["layers.1.self_attn.weights"].rows == (4, 2, 7, 7)
    assert "layers.1: same as above" in str(shapes)
    transformer = module_shapes(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), batch=3)
    assert transformer["decoder.layers.0.multihead_attn.weights"].rows == (3, 2, 7, 9)


def test_lstm_multiply_adds_match_hand_computation():
    shapes = module_shapes(nn.LSTM(6, 4), sizes=[(7, 2, 6)])
    assert shapes["output"].rows == (7, 2, 4)
    assert shapes.multiply_adds == 7 * 2 * (16 * 6 + 16 * 4)


def test_the_module_is_left_unchanged():
    model = GPT().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module_shapes(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_input_dtypes_are_inferred():
    assert module_shapes(GPT(), sizes=[(2, 4)])["head"].rows == (2, 4, 11)
    assert module_shapes(GPT(), sizes=[(2, 4)], dtypes=["long"])["head"].rows == (2, 4, 11)
    assert module_shapes(nn.Linear(3, 4), sizes=[(2, 3)])["output"].rows == (2, 4)
    assert module_shapes(nn.Linear(3, 4), sizes=[(2, 3)]).batch is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sizes": [(2, 10)]}, r"GPT does not take \(2, 10\) int64: RuntimeError: .* \(test_module_shapes.py:\d+\)"),
        ({"sizes": [(2, 4)], "dtypes": ["float"]}, r"GPT does not take \(2, 4\) float32"),
        ({"sizes": [(2, 4)], "dtypes": ["half"]}, "dtype must be one of float, .* got 'half'"),
        ({"sizes": [(2, 4)], "dtypes": ["long", "long"]}, "got 1 inputs and 2 dtypes"),
        ({"width": 3}, r"GPT accepts none of features \(5,7,3\)"),
    ],
)
def test_invalid_inputs_raise_one_line_errors(kwargs, message):
    with pytest.raises(ValueError, match=message) as caught:
        module_shapes(GPT(), **kwargs)
    assert "\n" not in str(caught.value)

"""The five steps of attention equal attend_reference; invalid input raises one-line errors."""

import json
import math
import os
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from clearhead.models.steps import EXAMPLE, EXAMPLE_HEADS, five_steps, read_steps_file
from clearhead.nn import masks
from clearhead.nn.attention import MultiHeadAttention, attend_reference

QKV = {
    "q": [[0.3367, 0.1288], [0.2345, 0.2303], [-1.1229, -0.1863]],
    "k": [[2.2082, -0.6380], [0.4617, 0.2674], [0.5349, 0.8094]],
    "v": [[1.1103, -1.6898], [-0.9890, 0.9580], [1.3221, 0.8172]],
}


def matrices(steps):
    return {name: matrix for step in steps for name, matrix in step.matrices.items()}


def reference(q, k, v, mask=None, beta=None):
    out, weights = attend_reference(q[None, None], k[None, None], v[None, None], mask, beta)
    return out[0, 0], weights[0, 0]


def test_three_token_example_matches_known_values():
    seen = matrices(five_steps(**QKV))
    weights = [[0.4028, 0.2886, 0.3086], [0.3538, 0.3069, 0.3393], [0.1303, 0.4630, 0.4067]]
    z = [[0.5698, -0.1520], [0.5379, -0.0265], [0.2246, 0.5556]]
    # inputs and expected values are rounded to four decimals
    torch.testing.assert_close(seen["weights"], torch.tensor(weights, dtype=torch.float64), atol=2e-4, rtol=0)
    torch.testing.assert_close(seen["z"], torch.tensor(z, dtype=torch.float64), atol=2e-4, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("beta", [None, 0.0, 2.0, -1.0, math.inf, -math.inf])
def test_the_steps_equal_attend_reference(beta, causal):
    torch.manual_seed(0)
    x, w_q, w_k, w_v = (torch.randn(*size, dtype=torch.float64) for size in [(5, 4), (4, 3), (4, 3), (4, 2)])
    seen = matrices(five_steps(x=x, w_q=w_q, w_k=w_k, w_v=w_v, beta=beta, causal=causal))
    mask = masks.causal(5) if causal else None
    z, weights = reference(x @ w_q, x @ w_k, x @ w_v, mask, beta)
    torch.testing.assert_close(seen["z"], z)
    torch.testing.assert_close(seen["weights"], weights)
    torch.testing.assert_close(seen["weights"].sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_each_step_follows_from_the_previous_one():
    steps = five_steps(**EXAMPLE)
    assert [step.number for step in steps] == [1, 2, 3, 4, 5]
    m = matrices(steps)
    torch.testing.assert_close(m["q"], m["x"] @ m["w_q"])
    torch.testing.assert_close(m["scores"], m["q"] @ m["k"].T)
    torch.testing.assert_close(m["scaled"], m["scores"] / m["q"].shape[1] ** 0.5)
    torch.testing.assert_close(m["weights"], m["scaled"].softmax(dim=1))
    torch.testing.assert_close(m["weighted"].sum(dim=1), m["z"])


def test_causal_masks_later_tokens():
    seen = matrices(five_steps(**EXAMPLE, causal=True))
    masked = torch.ones(3, 3).triu(1).bool()
    assert (seen["weights"][masked] == 0).all()
    assert (seen["scaled"][masked] == -math.inf).all()
    assert (seen["weights"][~masked] > 0).all()


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_equal_multi_head_attention(heads, causal):
    """MultiHeadAttention with the same weights gives the same output and attention weights."""
    torch.manual_seed(0)
    x, w_q, w_k, w_v, w_o = torch.randn(5, 4, 4, dtype=torch.float64)
    layer = MultiHeadAttention(4, heads, bias=False).double()
    for linear, weight in zip(
        (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), (w_q, w_k, w_v, w_o), strict=True
    ):
        linear.weight.data = weight.T.contiguous()
    seen = matrices(five_steps(x=x, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, heads=heads, causal=causal))
    with torch.no_grad():
        torch.testing.assert_close(seen["output"], layer(x[None], mask=masks.causal(4) if causal else None)[0])
    q, k, v = (y.unflatten(1, (heads, -1)).transpose(0, 1) for y in (x @ w_q, x @ w_k, x @ w_v))
    weights = attend_reference(q, k, v, masks.causal(4) if causal else None)[1]
    torch.testing.assert_close(seen["weights"], weights if heads > 1 else weights[0])


def test_custom_masks_apply_and_fully_masked_rows_are_zero():
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    steps = five_steps(**EXAMPLE, mask=mask)
    seen = matrices(steps)
    assert (seen["weights"] > 0).equal(mask)
    assert seen["z"][1].eq(0).all()
    assert "A row without visible keys is zero." in steps[2].explanation
    both = matrices(five_steps(**EXAMPLE, mask=mask, causal=True))
    assert (both["weights"] > 0).equal(mask & masks.causal(3))
    by_head = torch.stack([mask, ~mask])
    assert (matrices(five_steps(**EXAMPLE_HEADS, heads=2, mask=by_head))["weights"] > 0).equal(by_head)


def test_masked_scores_are_null_in_json():
    steps = five_steps(**EXAMPLE, causal=True)
    data = json.loads(json.dumps([step.to_dict() for step in steps], allow_nan=False))
    assert data[2]["matrices"]["scaled"]["values"][0][1:] == [None, None]
    assert data[4]["matrices"]["z"] == {"shape": [3, 3], "values": steps[4].matrices["z"].tolist()}


def write(path, content):
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_json_and_npz_files_are_read(tmp_path):
    from_json = five_steps(**read_steps_file(write(tmp_path / "my.json", {**QKV, "beta": "inf", "mask": "causal"})))
    arrays = {name: np.array(matrix) for name, matrix in QKV.items()}
    extras = {"beta": np.array(math.inf), "mask": np.array("causal")}
    from_npz = five_steps(**read_steps_file(write(tmp_path / "my.npz", {**arrays, **extras})))
    expected = matrices(five_steps(**QKV, beta=math.inf, causal=True))["z"]
    assert torch.equal(matrices(from_json)["z"], expected)
    assert torch.equal(matrices(from_npz)["z"], expected)


def test_files_may_contain_heads_and_a_mask(tmp_path):
    mask = [[1, 0, 1], [0, 0, 1], [1, 1, 1]]
    expected = matrices(five_steps(**EXAMPLE_HEADS, heads=2, mask=torch.tensor(mask).bool()))["output"]
    from_json = read_steps_file(write(tmp_path / "my.json", {**EXAMPLE_HEADS, "heads": 2, "mask": mask}))
    assert torch.equal(matrices(five_steps(**from_json))["output"], expected)
    additive = [[0 if n else "-inf" for n in row] for row in mask]
    from_json = read_steps_file(write(tmp_path / "my.json", {**EXAMPLE_HEADS, "heads": 2, "mask": additive}))
    assert torch.equal(matrices(five_steps(**from_json))["output"], expected)
    arrays = {name: np.array(matrix) for name, matrix in EXAMPLE_HEADS.items()}
    path = write(tmp_path / "my.npz", {**arrays, "heads": np.array(2), "mask": np.array(mask, dtype=bool)})
    assert torch.equal(matrices(five_steps(**read_steps_file(path)))["output"], expected)


def test_files_are_never_unpickled(tmp_path):
    path = write(tmp_path / "my.npz", {"x": np.array([print], dtype=object)})
    with pytest.raises(ValueError, match=r"numeric arrays saved by numpy.savez.*allow_pickle"):
        read_steps_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "must contain an object .* got \\[1\\]"),
        ({"wq": [[1]]}, "got 'wq' in my.json; did you mean w_q?"),
        ({}, "need x, w_q, w_k, w_v, or q, k, v, got nothing; add x, w_q, w_k, w_v"),
        ({"x": [[1]], "w_q": [[1]]}, "got x, w_q; add w_k, w_v"),
        ({"q": [[1]], "k": [[1]]}, "got q, k; add v"),
        ({**EXAMPLE, "q": [[1]]}, "got x, w_q, w_k, w_v, q; "),
        (
            {**QKV, "v": [[1, 2], [3], [4, 5]]},
            "every row of v must be as long as its first, 2 numbers, got 1 in row 2",
        ),
        ({**QKV, "v": [["a"]]}, "v must hold numbers.*got 'a' in row 1"),
        ({**QKV, "v": [[True]]}, "v must hold numbers.*got True"),
        ({**QKV, "v": [[math.nan]]}, "v must hold numbers of at most 1e\\+30, got nan in row 1"),
        ({**QKV, "v": [[10**400]]}, "v must hold numbers of at most 1e\\+30, got 1000"),
        ({**QKV, "v": [1, 2]}, "v must be a list of rows of numbers, got \\[1, 2\\]; try"),
        ({**QKV, "v": []}, "v must be a list of rows"),
        ({**QKV, "v": [[[1]]]}, "v must hold numbers.*got \\[1\\]"),
        (
            {**EXAMPLE, "w_k": [[1, 2]]},
            "w_k must have one row for each of the 4 columns.*got w_k \\[1, 2\\] for x \\[3, 4\\]",
        ),
        ({**EXAMPLE, "w_k": [[1]] * 4}, "queries and keys must have the same width, got 2 and 1"),
        ({**QKV, "v": [[1]]}, "one value for each key, got 3 keys and 1 values"),
        ({**QKV, "q": [[1, 1]] * 4, "mask": "causal"}, "needs 0 <= num_queries <= num_keys, got 4 and 3"),
        ({**QKV, "mask": "window"}, "mask must be \"causal\" or a matrix of 0 and 1, got 'window'"),
        (
            {**QKV, "mask": [[1, 0]]},
            "row for each of 3 queries and one column for each of 3 keys, got shape",
        ),
        ({**QKV, "mask": [[1, 0], [1]]}, "mask must be a matrix of 0 and 1 with one row for each query, got"),
        ({**QKV, "mask": [[1, 2, 0]] * 3}, "got 2 in row 1, column 2 of mask in my.json"),
        ({**QKV, "mask": [[0, 0, 0]] * 3}, "zeros only"),
        ({**QKV, "heads": 0}, "heads must be a positive integer, got 0"),
        ({**QKV, "heads": 3}, "heads must divide the 2 columns of q, got 3 heads"),
        ({**QKV, "w_o": [[1]]}, "w_o must have one row for each of the 2 columns of z, got 1 rows"),
        ({**QKV, "beta": "warm"}, "beta must be a number or inf, got 'warm'"),
        ({**QKV, "beta": True}, "beta must be a number or inf, got True"),
    ],
)
def test_invalid_json_contents_raise(tmp_path, content, message):
    path = write(tmp_path / "my.json", content)
    with pytest.raises(ValueError, match=message):
        five_steps(**read_steps_file(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("my.txt", b"", "must end in .json or .npz, got 'my.txt'"),
        ("my.json", b"\xff\xfe", "not valid JSON"),
        ("my.npz", b"not a zip", "numeric arrays saved by numpy.savez"),
        ("my.npz", b"PK\x03\x04 broken", "numeric arrays saved by numpy.savez"),
    ],
)
def test_invalid_file_formats_raise(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_steps_file(tmp_path / name)


def test_missing_files_raise(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory"):
        read_steps_file(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="got a folder"):
        read_steps_file(tmp_path / "folder.json")


def test_nan_beta_raises():
    with pytest.raises(ValueError, match="beta must be a number, got nan"):
        five_steps(**EXAMPLE, beta=math.nan)


def npz_of(path, name, header, claimed, version=b"\x01\x00"):
    """A .npz with one array of `claimed` zeros after its header, highly compressed."""
    length = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", b"\x93NUMPY" + version + length + header + bytes(claimed))
    return path


def array_header(shape, descr="<f8"):
    return repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"header": array_header((3000, 3000)), "claimed": 8 * 3000**2}, r"'x' has shape \(3000, 3000\)"),
        (
            {"header": array_header((30_000_000, 30_000_000)), "claimed": 8},
            "at most 4,194,304 values, got more in my",
        ),
        ({"header": array_header((3, 3), "<U9999999"), "claimed": 8}, r"'x' has shape \(3, 3\)"),
        ({"header": array_header((2, 2)), "claimed": 50_000_000}, r"'x' has shape \(2, 2\)"),
        ({"header": bytes(20_000_000), "claimed": 8, "version": b"\x02\x00"}, "expected 20000000 bytes got"),
    ],
)
def test_excessive_declared_arrays_are_rejected_before_reading(tmp_path, content, message):
    """Regression test: a file of 0.97 MB expanded to 6.1 GB."""
    path = npz_of(tmp_path / "my.npz", "x", **content)
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            read_steps_file(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_too_many_arrays_are_rejected(tmp_path):
    path = write(tmp_path / "my.npz", {f"x{i}": np.zeros((1, 1)) for i in range(50)})
    with pytest.raises(ValueError, match=r"may have at most 11 arrays, got 50 in my.npz"):
        read_steps_file(path)


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_pipes_and_oversized_files_are_rejected_without_reading(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(ValueError, match="got a pipe or a device"):
        read_steps_file(tmp_path / f"pipe{suffix}")
    with (tmp_path / f"long{suffix}").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ValueError, match="has 1,000,000,000,000 bytes, the limit is 10,000,000"):
        read_steps_file(tmp_path / f"long{suffix}")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"q": (3000, 1), "k": (3000, 1), "v": (3000, 1)},
            "got 9,000,000 from 3000 queries, 3000 keys and 1 columns of v",
        ),
        ({"q": (200, 8), "k": (200, 8), "v": (200, 800)}, "got 32,000,000 from 200 queries, 200 keys and 800 columns"),
        ({"x": (3000, 1), "w_q": (1, 3000), "w_k": (1, 3000), "w_v": (1, 1)}, "got 9,000,000 in x times w_q"),
        ({"q": (3, 1), "k": (1, 1), "v": (1, 1), "w_o": (1, 2_000_000)}, "got 6,000,000 in z times w_o"),
    ],
)
def test_oversized_results_are_rejected_before_computation(shapes, message):
    with pytest.raises(ValueError, match=message):
        five_steps(**{name: torch.ones(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("depth", [900, 960, 980, 990, 995, 100_000])
def test_deeply_nested_lists_raise_one_line_errors(tmp_path, depth):
    for text in ("[" * depth + "]" * depth, '{"x": ' + "[" * depth + "]" * depth + "}", '{"beta": ' + "9" * 5000 + "}"):
        with pytest.raises(ValueError, match=r"(must (be|contain|hold)|not valid JSON)") as caught:
            five_steps(**read_steps_file(write(tmp_path / "my.json", text)))
        assert "\n" not in str(caught.value)

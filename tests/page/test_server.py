"""The server: its page, the list of models with damaged and hostile runs, calls of a live model, and many clients."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from clearhead import page
from clearhead.cli import main as cli
from clearhead.page import BusyError, Page, Turns
from clearhead.page.models import SHIPPED, Catalog, Target, run_id
from clearhead.viewer import asset, asset_names

MODULE = """
import torch
from torch import nn


class Classifier(nn.Module):
    image_size, in_channels, patch_size = 8, 1, 4
    classes = ["left", "right", "<b>"]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(1, 8, 4, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        tokens = self.embed(images).flatten(2).mT
        return self.head(self.encoder(tokens).mean(1))


class Slow(Classifier):
    def forward(self, images):
        import time
        time.sleep(0.2)
        return super().forward(images)
"""
NO_EDITS = {"heads": [], "hiddenPatches": [], "maskedPatches": [], "beta": None}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page_test_module.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("page_test_module", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def opened(name="Classifier"):
    return Catalog(Target(module=f"page_test_module.py:{name}"))


def call(header, pixels=bytes(64)):
    return json.dumps({"edits": NO_EDITS, **header}).encode() + b"\n" + pixels


def models_of(client):
    return {model["id"]: model for model in json.loads(client.get("/api/models").body)["models"]}


# The page


def test_the_page_and_its_files(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert b"js/host.js" in answer.body
    for name in asset_names():
        answer = client.get(f"/{name}")
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        assert answer.headers["content-type"].startswith(kind)
        assert answer.body.decode() == asset(name)


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/js/../__init__.py", "/js/%2e%2e/__init__.py", "/__init__.py", "/js/", "//", "/api"]
)
def test_no_other_file_is_served(path, client):
    assert client.get(path).status == 404


def test_the_shipped_checkpoint_needs_no_torch(tmp_path):
    """In a fresh process: the server answers within two seconds of the command, before torch is imported."""
    code = (
        "import sys\n"
        "from clearhead.page import Page\n"
        "from clearhead.page.models import SHIPPED, Catalog\n"
        "catalog = Catalog()\n"
        "Page(catalog)\n"
        "assert catalog.load(SHIPPED).description.kind == 'model'\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_prints_its_link_and_ctrl_c_ends_it(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "clearhead", "open", "--no-browser"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("http://127.0.0.1:" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert errors == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["open", "missing"], "missing"),
        (["open", "missing.py:b"], "missing.py"),
        (["open", "--port", "70000"], "65535"),
        (["open", "--model", "a.py:b"], "RUN"),
        (["open", "a.py:b", "--image", "28x28"], "--image"),
        (["open", "--host", "0.0.0.0", "--no-browser"], "--host"),
        (["export", "missing", "--to", "html"], "missing"),
        (["export", "missing", "--to", "html", "--out", "x.png"], "html"),
        (["export", "missing", "--to", "pdf"], "html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_reported_in_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("b = 1\n")
    assert cli.main(argv) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors


# The list of models


def test_runs_are_listed_with_what_cannot_be_shown(trained, serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs")
    with serve(Catalog()) as client:
        models = models_of(client)
        by_title = {model["title"]: model for model in models.values()}
        assert not by_title["mnist"]["problem"]
        assert "mnist" in by_title["mnist"]["detail"]
        for name in ("reverse", "words", "pronounce"):
            assert f"clearhead look runs/{name}" in by_title[name]["problem"]
            assert client.get(f"/api/models/{by_title[name]['id']}/description").status == 422
        described = json.loads(client.get(f"/api/models/{by_title['mnist']['id']}/description").body)
        assert described["kind"] == "model"
        tensors = load(client.get(f"/api/models/{by_title['mnist']['id']}/tensors").body)
        assert tensors["examples.pixels"].dtype == np.uint8
        assert any(name.startswith("model.blocks.0.attn") for name in tensors)


def test_damaged_and_hostile_runs_are_listed_and_harm_nobody(trained, serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret contents")
    for name in ("link", "damaged", "no-config", "config-link", "not-json", "cut", "weights", "pipe", "<img src=x>"):
        shutil.copytree(trained / "mnist", tmp_path / "runs" / name)
    runs = tmp_path / "runs"
    (runs / "link/extra").symlink_to(secret)
    (runs / "damaged/config.json").write_text('{"recipe": "mnist"}')
    (runs / "no-config/config.json").unlink()
    (runs / "config-link/config.json").unlink()
    (runs / "config-link/config.json").symlink_to(secret)
    (runs / "not-json/config.json").write_bytes(b"\xff{")
    shutil.rmtree(runs / "cut/checkpoints")
    for file in (runs / "weights/checkpoints").glob("*/model.safetensors"):
        file.write_bytes(b"\xff" * 100)
    os.mkfifo(runs / "pipe/figure")
    (runs / "file").write_text("no folder")
    (runs / "dangling").symlink_to(tmp_path / "nothing")
    with serve(Catalog()) as client:
        models = {model["title"]: model for model in models_of(client).values()}
        assert {"no-config", "file", "dangling"}.isdisjoint(models)
        for name in ("link", "damaged", "config-link", "not-json", "cut", "pipe"):
            assert models[name]["problem"], name
        assert not models["<img src=x>"]["problem"]
        for model in models.values():
            for part in ("description", "tensors"):
                answer = client.get(f"/api/models/{model['id']}/{part}")
                assert answer.status in (200, 422)
                assert (answer.status == 200) == (model["title"] == "<img src=x>" or model["id"] == SHIPPED)
                assert b"secret contents" not in answer.body
        assert client.get("/api/models").status == 200


def test_a_model_is_named_by_the_list_and_never_by_a_path(trained, serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve(Catalog()) as client:
        for name in ("runs%2Fmnist", str(trained / "mnist").replace("/", "%2F"), "..%2f..", run_id(trained / "mnist")):
            assert client.get(f"/api/models/{name}/description").status == 404


def test_a_new_run_appears_and_a_new_checkpoint_is_loaded(trained, serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve(catalog := Catalog()) as client:
        assert list(models_of(client)) == [SHIPPED]
        shutil.copytree(trained / "mnist", tmp_path / "runs/new")
        time.sleep(1.1)
        (new,) = set(models_of(client)) - {SHIPPED}
        first = catalog.load(new)
        assert catalog.load(new) is first
        os.utime(tmp_path / "runs/new/best.json")
        assert catalog.load(new) is not first
        assert len(catalog.loaded) == 1


def test_an_opened_run_is_shown_first_wherever_it_is(trained, serve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve(Catalog(Target(run=trained / "mnist"))) as client:
        answer = json.loads(client.get("/api/models").body)
        assert answer["opened"] == run_id(trained / "mnist")
        assert answer["opened"] in {model["id"] for model in answer["models"]}


# A live model


def test_a_live_model_computes_what_torch_computes(home, serve):
    import torch

    with serve(opened()) as client:
        description = json.loads(client.get("/api/models/opened/description").body)
        assert description["kind"] == "live"
        assert description["grid"] == [2, 2]
        assert description["classes"] == ["left", "right", "<b>"]
        pixels = np.random.default_rng(0).integers(0, 256, (1, 1, 8, 8), dtype=np.uint8)
        answer = load(client.post("/api/models/opened/run", call({"call": "run"}, pixels.tobytes())).body)
        from page_test_module import Classifier

        with torch.no_grad():
            expected = Classifier().eval()(torch.from_numpy(pixels) / 255)
        np.testing.assert_allclose(answer["logits"], expected[0].numpy(), rtol=0, atol=1e-6)
        assert answer["layers.0"].shape == (2, 4, 4)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"null\n" + bytes(64),
        call({"call": "run"}, bytes(63)),
        call({"call": "run"}, bytes(65)),
        call({"call": "eval"}),
        call({"call": "run", "target": 1}),
        call({"call": "head_effects"}),
        call({"call": "head_effects", "target": 3}),
        call({"call": "head_effects", "target": True}),
        call({"call": "attribute", "method": "magic", "target": 0}),
        call({"call": "head_steps", "layer": "x", "head": 0}),
        call({"call": "head_steps", "layer": ["x"], "head": 0}),
        call({"call": "run", "edits": {}}),
        call({"call": "run", "edits": NO_EDITS | {"beta": "1"}}),
        call({"call": "run", "edits": NO_EDITS | {"hiddenPatches": [4]}}),
        call({"call": "run", "edits": NO_EDITS | {"maskedPatches": [-1]}}),
        call({"call": "run", "edits": NO_EDITS | {"heads": [{"layer": "x", "head": 0, "pattern": "zero"}]}}),
        call({"call": "run", "edits": NO_EDITS | {"heads": [[1]]}}),
    ],
)
def test_invalid_calls_are_refused_with_a_sentence(body, home, serve):
    with serve(opened()) as client:
        answer = client.post("/api/models/opened/run", body)
        assert answer.status == 422
        assert json.loads(answer.body)["error"]
        assert client.post("/api/models/opened/run", call({"call": "run"})).status == 200


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("page_test_module.py:Missing", "Missing"),
        ("missing.py:Model", "missing.py"),
        ("page_test_module.py:nn", "nn.Module"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_explained_on_the_page(target, message, home, serve):
    with serve(Catalog(Target(module=target))) as client:
        answer = client.get("/api/models/opened/description")
        assert answer.status in (404, 422)
        assert message in json.loads(answer.body)["error"]
        assert client.get("/api/models/shipped/description").status == 200


def test_a_module_without_attention_or_of_other_inputs_is_explained(home, serve):
    (home / "page_test_module.py").write_text(
        "from torch import nn\n"
        "class Flat(nn.Sequential):\n"
        "    image_size = 8\n"
        "    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(192, 3))\n"
        "class Unknown(Flat):\n"
        "    image_size = None\n"
    )
    for name, words in (("Flat", "no attention"), ("Unknown", "--image")):
        with serve(opened(name)) as client:
            assert words in json.loads(client.get("/api/models/opened/description").body)["error"]


# Many clients


def test_the_newest_call_comes_first_and_the_oldest_is_refused():
    async def scenario():
        turns, order, gate = Turns(max_waiting=2), [], asyncio.Event()

        async def caller(name):
            try:
                async with turns.turn():
                    if name == "first":
                        await gate.wait()
                    order.append(name)
            except BusyError:
                order.append(f"{name} refused")

        tasks = []
        for name in ("first", "a", "b", "c"):
            tasks.append(asyncio.create_task(caller(name)))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)
        assert not turns.is_busy
        assert not turns.waiting
        return order

    assert asyncio.run(scenario()) == ["a refused", "first", "c", "b"]


def test_a_cancelled_call_does_not_block_the_others():
    async def scenario():
        turns, gate, done = Turns(9), asyncio.Event(), []

        async def caller(name):
            async with turns.turn():
                await gate.wait()
                done.append(name)

        tasks = [asyncio.create_task(caller(i)) for i in range(4)]
        await asyncio.sleep(0.01)
        tasks[3].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn():
            return done

    assert sorted(asyncio.run(scenario())) == [0, 1, 2]


def test_a_full_queue_is_answered_with_503_and_a_time_to_retry(home, serve, monkeypatch):
    monkeypatch.setattr("clearhead.page.MAX_WAITING", 2)
    with serve(opened("Slow")) as client:
        assert client.get("/api/models/opened/description").status == 200
        answers = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(client.post("/api/models/opened/run", call({"call": "run"})))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = [answer.status for answer in answers]
        assert set(statuses) == {200, 503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status == 503)


def clients_for(client, seconds, num_clients=64):
    """Statuses of all answers to many clients that request different things for some seconds."""
    requests = [
        ("GET", "/", None),
        ("GET", "/js/host.js", None),
        ("GET", "/api/models", None),
        ("GET", "/api/models/shipped/tensors", None),
        ("GET", "/api/models/opened/description", None),
        ("POST", "/api/models/opened/run", call({"call": "run"})),
        ("POST", "/api/models/opened/run", call({"call": "head_effects", "target": 1})),
        ("GET", "/missing", None),
    ]
    statuses: list[int] = []
    end = time.monotonic() + seconds

    def work(number):
        i = number
        while time.monotonic() < end:
            i += 1
            method, path, body = requests[i % len(requests)]
            statuses.append(client.send(method, path, body).status)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def test_64_clients(home, serve):
    with serve(opened()) as client:
        assert client.get("/api/models/opened/description").status == 200
        statuses = clients_for(client, seconds=3)
        assert len(statuses) > 64
        assert set(statuses) <= {200, 404, 503}
        assert statuses.count(200) > len(statuses) / 3
        assert client.get("/").status == 200


@pytest.mark.soak
def test_64_clients_for_a_minute_do_not_make_the_server_grow(home, open_link):
    """The server is a process of its own; its memory is read after a warm-up of 15 s and at the end."""
    command = [sys.executable, "-m", "clearhead", "open", "page_test_module.py:Classifier", "--no-browser"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as process:
        try:
            link = next(line.strip() for line in iter(process.stdout.readline, "") if "http://" in line)
            client = open_link(link)
            assert client.get("/api/models/opened/description").status == 200
            statuses = clients_for(client, 15)
            before = resident_bytes(process.pid)
            statuses += clients_for(client, 60)
            growth = resident_bytes(process.pid) / before - 1
        finally:
            process.terminate()
    print(f"{len(statuses):,} answers, {statuses.count(503):,} of them 503; memory growth {growth:.1%}")
    assert set(statuses) <= {200, 404, 503}
    assert growth < 0.05


def resident_bytes(process_id):
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_an_unexpected_error_is_one_line_and_no_end(home, serve, monkeypatch, capsys):
    def fail(self):
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(Catalog, "models", fail)
    with serve(Catalog()) as client:
        answer = client.get("/api/models")
        assert answer.status == 500
        assert b"broken" not in answer.body
        assert client.get("/").status == 200
    assert isinstance(Page(Catalog()).html, str)


# Runs of the user's own module


def test_a_run_of_fit_is_shown_with_its_module(home, serve):
    import torch

    import clearhead
    from clearhead.insight.doctor.loading import load as load_module

    model = load_module("page_test_module.py:Classifier", home)
    images, labels = torch.rand(16, 1, 8, 8), torch.arange(16) % 3
    clearhead.fit(model, (images, labels), epochs=1, batch_size=8, dir="runs/fitted", quiet=True)
    with serve(Catalog()) as client:
        (listed,) = [model for model in models_of(client).values() if model["title"] == "fitted"]
        assert "--model FILE.py:NAME" in listed["problem"]
    target = Target(run=Path("runs/fitted"), module="page_test_module.py:Classifier")
    with serve(Catalog(target)) as client:
        pixels = np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8)
        answer = client.post("/api/models/opened/run", call({"call": "run"}, pixels.tobytes()))
        with torch.no_grad():
            expected = clearhead.open_run("runs/fitted", model=model).model(torch.from_numpy(pixels) / 255)
        np.testing.assert_allclose(load(answer.body)["logits"], expected[0].numpy(), atol=1e-5)


# The command


@pytest.mark.parametrize("name", ["reverse", "sum", "odd-one-out"])
def test_a_run_of_sequences_names_the_command_that_shows_it(name, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["open", str(trained / name), "--no-browser"]) == 2
    command = capsys.readouterr().err.partition("try: clearhead ")[2].split()
    assert cli.main(command) == 0
    assert (tmp_path / "attention.html").exists()


def test_a_busy_port_is_reported(client, capsys):
    assert cli.main(["open", "--no-browser", "--port", str(client.port)]) == 1
    assert f"127.0.0.1:{client.port}" in capsys.readouterr().err


def test_other_machines_are_warned_about(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clearhead.page.serve", lambda catalog, announce, **options: announce("http://x:99/?token=y"))
    assert cli.main(["open", "--host", "192.168.1.5"]) == 0
    warning = capsys.readouterr().err
    for word in ("192.168.1.5", "99", "models", "test images", "not encrypted"):
        assert word in warning
    assert cli.main(["open", "--host", "127.0.0.2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("browser", [True, False])
def test_the_browser_is_opened_with_a_link_for_one_use(browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened_links, printed, servers = [], [], []
    create = page.create_server
    monkeypatch.setattr(webbrowser, "open", opened_links.append)
    monkeypatch.setattr(page, "create_server", lambda *args: servers.append(create(*args)) or servers[0])
    options = {"host": "127.0.0.1", "port": 0, "browser": browser, "announce": printed.append}
    thread = threading.Thread(target=page.serve, args=(Catalog(),), kwargs=options)
    thread.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (printed and len(opened_links) == browser):
        time.sleep(0.02)
    servers[0].should_exit = True
    thread.join()
    assert len(opened_links) == browser
    for link in opened_links:
        assert link != printed[0]
        assert link.partition("?")[0] == printed[0].partition("?")[0]

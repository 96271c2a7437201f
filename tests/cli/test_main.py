"""The main command: help is instant, errors are one line, and exit codes are documented."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from clearhead import __version__
from clearhead.cli import main as cli
from clearhead.cli.main import COMMANDS, GROUPS, main


def python(*args, **options):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_in_its_group(run_cli, argv):
    out = run_cli(*argv)
    for group, commands in GROUPS.items():
        section = out.partition(f"\n{group}\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(commands)
        assert all(command.summary in section for command in commands.values())
    assert max(map(len, out.splitlines())) <= 80


EXAMPLES = [
    "clearhead recipes",
    "clearhead train reverse --name mine --training.steps 150",
    "clearhead resume mine --epochs 20",
    "clearhead runs",
    "clearhead curves runs/mine --epochs 10 20 30",
    "clearhead evaluate runs/mine --part validation",
    "clearhead confusion runs/mine",
    "clearhead predictions runs/mine",
    "clearhead report runs/mine --samples 3",
    "clearhead predict runs/mine --ids 3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3",
    "clearhead sample runs/words-0 --prompt un",
    "clearhead verify runs/mine",
    "clearhead verify-resume reverse",
    "clearhead export runs/images --to html",
    "clearhead look runs/mine --sample 3",
    "clearhead doctor mymodel.py:GPT",
    "clearhead shapes bert_cifar10",
    "clearhead ask causal-mask",
    "clearhead lab scaled-key --alpha 10",
    "clearhead steps --causal",
    "clearhead mask causal --tokens 5",
    "clearhead data list",
    "clearhead completion bash",
]
"""one of each command but `demo`, which trains for a minute (test_train.py), and `open`, which serves until it is
stopped (tests/page/test_server.py)"""


def test_examples_cover_every_command():
    assert [example.split()[1] for example in EXAMPLES] == [name for name in COMMANDS if name not in ("demo", "open")]


@pytest.mark.slow
def test_every_command_works(capsys, tmp_path, monkeypatch):
    """In this order, because later commands use the run of an earlier one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mymodel.py").write_text(
        "from clearhead import LanguageModel\nfrom clearhead.models.presets import gpt_tiny\n"
        "def GPT():\n    return LanguageModel.from_config(gpt_tiny())\n"
    )
    assert main(["train", "words", "--training.steps", "2", "--data.limit", "600"]) == 0  # for `sample`
    images = ["--name", "images", "--model.width", "16", "--model.patch-size", "14", "--model.patch-embed", "patch"]
    assert main(["train", "mnist", "--training.steps", "2", "--data.limit", "200", *images]) == 0  # for `export`
    for example in EXAMPLES:
        assert main(example.split()[1:]) == 0, example
        assert capsys.readouterr().out


def test_version(run_cli):
    assert run_cli("--version") == f"clearhead {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["lab"],
        ["recipes"],
        ["recipes", "--json"],
        ["shapes"],
        ["shapes", "vit_tiny", "--help"],
        ["shapes", "mnist", "--help"],
        ["shapes", "mymodel.py:GPT", "--help"],
        ["shapes", "vit_tny"],
        ["mask"],
        ["mask", "casual"],
        ["mask", "window"],
        ["shapes", "vit_tiny", "--widht", "3"],
        ["shapes", "vit_tiny", "--width", "100"],
        ["steps", "--beta", "warm"],
        ["shpaes"],
        ["train"],
        ["train", "mnist", "--help"],
        ["train", "mnist", "--training.epohcs", "3"],
        ["train", "mnist", "--model.width", "63"],
        ["runs"],
        ["runs", "nowhere"],
        ["verify"],
        ["verify", "nowhere"],
        ["doctor"],
    ],
)
def test_help_errors_and_listings_do_not_import_torch(argv):
    code = "import sys; from clearhead.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    assert python("-c", code, *argv).stdout.endswith("False\n")


def test_python_m_clearhead_imports_nothing_from_the_current_folder(tmp_path):
    for name in ("difflib", "argparse", "torch"):
        (tmp_path / f"{name}.py").write_text("open('PWNED', 'w')")
    done = python("-m", "clearhead", "shapes", "vit_tny", cwd=tmp_path)
    assert (done.returncode, "did you mean vit_tiny?" in done.stderr) == (2, True)
    assert not (tmp_path / "PWNED").exists()


def test_help_takes_less_than_0_3_seconds():
    def seconds():
        start = time.perf_counter()
        assert python("-m", "clearhead", "--help").returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(8)) < 0.3


def test_python_m_clearhead_reports_errors_in_one_line():
    done = python("-m", "clearhead", "shapes", "vit_tiny", "--width", "100")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("shpaes", f"unknown command 'shpaes'; did you mean shapes? Choose from {', '.join(COMMANDS)}"),
        ("--jsn", "unknown command '--jsn'; choose from demo, "),
        ("shapes vit_tny", "unknown model 'vit_tny'; did you mean vit_tiny? Choose from the presets "),
        ("shapes xyz", "unknown model 'xyz'; choose from the presets "),
        ("shapes --jsn", "shapes NAME has no option --jsn; did you mean --json?"),
        ("shapes vit_tiny --widht 3", "shapes vit_tiny has no option --widht; did you mean --width?"),
        ("shapes vit_tiny --n_hedas=3", "has no option --n-hedas; did you mean --num-heads?"),
        ("shapes vit_tiny --zzz", "has no option --zzz; see clearhead shapes vit_tiny --help"),
        ("shapes vit_tiny 5", "unexpected argument '5'"),
        ("shapes vit_tiny --width", "--width: expected one argument; see clearhead shapes vit_tiny --help"),
        ("shapes vit_tiny --width abc", "--width: must be an integer, got 'abc'"),
        ("shapes vit_tiny --mlp-dim abc", "--mlp-dim: must be an integer, or none, got 'abc'"),
        ("shapes vit_tiny --dropout abc", "--dropout: must be a number, got 'abc'"),
        ("shapes vit_tiny --image-size 3x", "must be an integer, or two such as 32x64, got '3x'"),
        (
            "shapes vit_tiny --width 100",
            "width must be a multiple of num_heads, got width=100, num_heads=3; try width=99",
        ),
        ("shapes vit_tiny --norm middle", "norm must be one of pre, post, none, got 'middle'"),
        ("shapes vit_tiny --batch 0", "batch must be a positive integer, got 0"),
        ("shapes vit_tiny --rows --columns", "--columns: not allowed with argument --rows"),
        ("shapes vit_tiny --length 5", "follows from image_size and patch_size, got length=5"),
        ("sample x --temperature=--", "--temperature: expected one argument, got '--'"),
        (
            f"shapes vit_tiny --depth {'9' * 400}",
            "depth must be at most 2^63 - 1, got 99",
        ),
        (
            f"train mnist --model.width {'9' * 400}",
            "width must be at most 2^63 - 1, got 99",
        ),
        ("steps --beta nan", "--beta: must be a number or inf, got 'nan'"),
        ("steps --file nowhere.json", "nowhere.json: No such file or directory"),
        ("steps my.json", "steps: unexpected argument 'my.json'"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(capsys, argv, message):
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("clearhead: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_multiline_error_is_printed_as_one_line(capsys, monkeypatch):
    def fail(argv):
        raise LookupError("first\n  second")

    monkeypatch.setattr(cli, "run", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == "clearhead: first second\n"


def test_ctrl_c_prints_nothing_and_exits_with_code_130(capsys, monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_os_error_without_a_file_is_one_line(capsys, monkeypatch):
    def fail(argv):
        raise ConnectionError("a process has ended; resume the run")

    monkeypatch.setattr(cli, "run", fail)
    assert main([]) == 1
    assert capsys.readouterr().err == "clearhead: a process has ended; resume the run\n"


def test_an_internal_error_is_one_line_unless_a_traceback_is_requested(capsys, monkeypatch):
    def fail(argv):
        raise RuntimeError("shapes do not match\nand so on")

    monkeypatch.setattr(cli, "run", fail)
    assert main([]) == 5
    err = "clearhead: RuntimeError: shapes do not match (unexpected; CLEARHEAD_TRACEBACK=1 shows where)\n"
    assert capsys.readouterr().err == err
    monkeypatch.setenv("CLEARHEAD_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main([])


@pytest.mark.parametrize(
    "error", [KeyError("standing"), IndexError("no"), UnicodeEncodeError("utf-8", "x", 0, 1, "no")]
)
def test_key_index_and_unicode_errors_are_internal_errors(capsys, monkeypatch, error):
    """Their messages alone, such as 'standing' or 'utf-8', would explain nothing."""

    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert main([]) == 5
    err = capsys.readouterr().err
    assert err.startswith(f"clearhead: {type(error).__name__}: ")
    assert err.endswith("(unexpected; CLEARHEAD_TRACEBACK=1 shows where)\n")


def memory_error_of_torch():
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("error", [MemoryError(), memory_error_of_torch(), RuntimeError("CUDA out of memory. Tried")])
def test_out_of_memory_suggests_a_smaller_size(capsys, monkeypatch, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert main([]) == 5
    message = "clearhead: out of memory; try a smaller batch, model or input\n"
    assert capsys.readouterr().err == message


def test_a_closed_pipe_prints_no_error():
    writer = subprocess.Popen(
        [sys.executable, "-m", "clearhead", "shapes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=60) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_reported_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "clearhead"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "clearhead: No space left on device: output\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
@pytest.mark.parametrize("argv", [["--help"], ["shapes", "vit_tiny", "--help"], ["shapes", "vit_tiny"], ["steps"]])
def test_lost_output_is_a_failure(monkeypatch, capsys, argv):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(argv) == 1
    assert capsys.readouterr().err == "clearhead: No space left on device: output\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_the_exit_code_does_not_depend_on_stderr(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["shpaes"]) == 2
        assert main(["--version"]) == 0
        full.flush()  # nothing is left that would fail when Python exits
    assert capsys.readouterr().out == f"clearhead {__version__}\n"


def test_main_restores_stdout_and_stderr(capsys):
    streams = sys.stdout, sys.stderr
    main(["--version"])
    main(["shpaes"])
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_reuses_the_descriptor_of_a_closed_stream(closed, tmp_path):
    """Otherwise output would be written into that file."""
    code = "from clearhead.cli import main; main.run = lambda argv: print(open('number', 'w').fileno(), 'x') or 0"
    note = "print('n', file=open('number', 'w').fileno() > 2 and open('kept', 'w') or None)"
    script = f"{code}; main.main([]); {note}"
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, script], cwd=tmp_path, check=True)
    assert (tmp_path / "kept").read_text() == "n\n"
    assert (tmp_path / "number").read_text() == ""

"""`clearhead ask`."""

import json
import subprocess
import sys

import pytest

from clearhead.cli.learn import answer_text, wrap_inline
from clearhead.cli.main import main
from clearhead.course import answers


def test_all_questions_are_listed_by_topic(run_cli):
    out = run_cli("ask")
    for answer in answers().values():
        assert f"  {answer.slug} " in out
        assert f"{answer.number}. {answer.question[:20]}" in out
        assert f"{answer.topic}\n" in out
    assert max(map(len, out.splitlines())) <= 88


@pytest.mark.parametrize("slug", answers())
def test_answers_are_printed(run_cli, slug):
    answer = answers()[slug]
    out = run_cli("ask", slug)
    assert out.startswith(f"{answer.number}. {answer.question[:20]}")
    assert "Misconception: " in out
    for evidence in answer.evidence:
        assert f"Lab: `{evidence.claim}` holds." in out
    assert all(f"\n  {command}\n" in out for command in answer.commands)
    assert "**" not in out


def test_json(run_cli):
    (one,) = json.loads(run_cli("ask", "causal-mask", "--json"))
    assert one["slug"] == "causal-mask"
    assert {"number", "topic", "question", "body", "evidence", "misconception", "commands"} <= set(one)
    assert [answer["slug"] for answer in json.loads(run_cli("ask", "--json"))] == list(answers())


def test_an_unknown_question_is_one_line_with_suggestions(capsys):
    assert main(["ask", "casual-mask"]) == 2
    err = capsys.readouterr().err
    assert "did you mean causal-mask" in err
    assert err.count("\n") == 1


def test_code_is_styled_on_a_terminal_and_keeps_its_backticks_elsewhere():
    answer = answers()["causal-mask"]
    assert "`additive-mask`" in answer_text(answer, 80, is_terminal=False).plain
    styled = answer_text(answer, 80, is_terminal=True)
    assert "`" not in styled.plain
    assert styled.spans


def test_spans_are_not_broken_across_lines():
    assert wrap_inline("aaa `clearhead lab` bbb", 10) == ["aaa", "`clearhead lab`", "bbb"]


def test_ask_does_not_import_torch():
    code = (
        "import sys; from clearhead.cli.main import run; run(['ask', 'causal-mask']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

"""`card chat` on a terminal: it greets, has commands, and an answer that is cut short is part of what was said."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from card.api.llm import LLM
from card.cli.chat import ChatSession
from card.cli.turns import Turn
from card.config import SamplingParams
from tests.cli.terminal import CTRL_C, terminal
from tests.pair import Pair
from tests.server.scripted import scripted_bytes

UNMEASURED = ("--policy", "fixed", "--threads", "1")  # nothing is measured at the start

pytestmark = pytest.mark.timeout(240)


def test_a_conversation_greets_helps_counts_forgets_and_ends(pair: Pair) -> None:
    arguments = ["--target", pair.target, "--method", "vanilla", "--dtype", "float32", "--max-tokens", "4"]
    with terminal(["chat", *arguments, *UNMEASURED]) as one:
        at = one.wait_for(f"{pair.target} answers")
        assert "often wrong" not in one.text
        at = one.wait_for("> ", after=one.wait_for("/help", after=at))
        for command, said in [
            ("/help", "forget the conversation"),
            ("/stats", "there is no answer yet"),
            ("/sing", "there is no /sing; /help lists"),
            ("/reset", "forgotten"),
        ]:
            one.type(f"{command}\n")
            at = one.wait_for("> ", after=one.wait_for(said, after=at))
        one.type("\n")
        one.type("hello\n")
        at = one.wait_for("\n> ", after=one.wait_for("hello\n", after=at))
        one.type("/stats\n")
        one.wait_for("tokens/s", after=at)
        one.type("/quit\n")
        assert one.wait() == 0


def test_several_lines_that_are_pasted_or_typed_are_one_turn(pair: Pair) -> None:
    arguments = ["--target", pair.target, "--method", "vanilla", "--dtype", "float32", "--max-tokens", "4"]
    with terminal(["chat", *arguments, *UNMEASURED]) as one:
        at = one.wait_for("> ", after=one.wait_for("/help"))
        one.type("\x1b[200~/system one\rtwo\rthree\x1b[201~\n")  # as terminals send a paste
        at = one.wait_for("\n> ", after=one.wait_for("three", after=at))
        one.type("/stats\n")
        at = one.wait_for("> ", after=one.wait_for("tokens/s", after=at))
        one.type('/system """Be\n')
        at = one.wait_for("... ", after=at)
        one.type('short."""\n')
        at = one.wait_for("> ", after=one.wait_for("(the system prompt is set)", after=at))
        one.type("/system\n")
        one.wait_for("> ", after=one.wait_for("Be\nshort.\n", after=at))  # before that, a terminal swallows Ctrl-D
        one.type("\x04")
        assert one.wait() == 0
    assert "there is no" not in one.text
    assert one.text.count("(the system prompt is set)") == 1, "the paste was said, not obeyed"


def test_the_demo_target_warns_of_itself_and_ctrl_c_cuts_an_answer_short_and_the_conversation_goes_on() -> None:
    slowly = ["--target-cost", "90M", "--method", "vanilla"]  # so that no answer is over before Ctrl-C comes
    arguments = ["--dtype", "float32", "--ignore-eos", *slowly]
    with terminal(["chat", *arguments, *UNMEASURED]) as one:
        at = one.wait_for("demo-target is built in and small: it knows grade-school word problems only")
        at = one.wait_for("> ", after=at)
        for line in ("Tell me of cats.", "Three dogs have 4 legs each. How many legs are that?"):
            one.type(f"{line}\n")
            at = one.wait_for("<<", after=at)  # it calculates, whatever it is asked
            one.type(CTRL_C)
            at = one.wait_for("\n> ", after=one.wait_for("[cut short]", after=at))
        one.type("\x04")
        assert one.wait() == 0
    assert "Traceback" not in one.text


def test_an_answer_that_was_cut_short_stays_in_the_conversation_as_far_as_it_got(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    chunks = 0

    def interrupt_the_third_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sys.stdout.flush", interrupt_the_third_chunk, raising=False)
    with (
        LLM(pair.target, pair.draft, dtype="float32", placement="inline") as llm,
        LLM(pair.target, dtype="float32", method="vanilla") as plain,
    ):
        talk = ChatSession(llm, params, shows_stats=False)
        talk.run_turn(Turn("go on"))
        cut = talk.messages[1]["content"]
        whole = plain.chat([{"role": "user", "content": "go on"}], params)[0].outputs[0].text
        assert 0 < len(cut) < len(whole) and whole.startswith(cut)
        talk.run_turn(Turn("and now?"))
        asked = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": cut}]
        asked.append({"role": "user", "content": "and now?"})
        assert talk.messages[:3] == asked
        assert talk.messages[3]["content"] == plain.chat(asked, params)[0].outputs[0].text
        talk.run_turn(Turn("", "/reset"))
        assert talk.messages == []
        assert llm.stats().num_running == 0
    assert "[cut short]" in capsys.readouterr().out


def test_thoughts_shrink_to_a_note_and_are_shown_when_asked_for(tmp_path: Path) -> None:
    scripts = {"think": ["<think>Hm", " so.", "</think>\n", "\nNo", "."]}
    model = scripted_bytes(scripts, "{# </think> #}{{ messages[-1].content }}")
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    arguments = ["--target", str(tmp_path), "--method", "vanilla", "--dtype", "float32", "--max-tokens", "20"]
    with terminal(["chat", *arguments, *UNMEASURED]) as one:
        at = one.wait_for("> ", after=one.wait_for("/help"))
        one.type("think\n")
        at = one.wait_for("(thought for 3 tokens; /thoughts shows them)", after=at)
        at = one.wait_for("> ", after=one.wait_for("No.", after=at))
        one.type("/thoughts\n")
        one.wait_for("> ", after=one.wait_for("Hm so.", after=at))
        one.type("\x04")
        assert one.wait() == 0

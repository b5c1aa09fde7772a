"""The command line: what it prints where, and that whatever is wrong with its input is one line and exit status 2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

import card
from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.models.loading import load_tokenizer
from card.models.warn_once import warn_once
from tests.commands import Ran, run_command
from tests.pair import Pair
from tests.processes import unhurried
from tests.reaching_in import say_why_not_int8
from tests.waiting import PATIENCE_S

PROMPT = "the cat sat"
RUN = [sys.executable, "-m", "card"]
STATS_KEYS = {
    "wall_s",
    "prefill_s",
    "decode_tokens_per_s",
    "target_passes",
    "drafter_passes",
    "mean_acceptance_length",
    "hit_rate",
    "drafter_restarts",
    "drafter_state",
    "seed",
}

pytestmark = pytest.mark.timeout(240)
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="only oneDNN knows the CPU's instructions"
)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd)


def child_env() -> dict[str, str]:
    package_root = str(Path(card.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def cut_at(num_tokens: int) -> str:
    """Return what is said of an answer that so many tokens were the bound of."""
    return f"card: the answer is cut off: {num_tokens} tokens are the most; --max-tokens allows more\n"


def assert_one_line(ran: Ran, said: str) -> None:
    assert ran.status == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("card: error: ")
    assert ran.err.endswith("\n")
    assert ran.err.count("\n") == 1, ran.err
    assert said in ran.err


@pytest.fixture(scope="module")
def models(pair: Pair) -> list[str]:
    return ["--target", pair.target, "--draft", pair.draft, "--placement", "inline", "--dtype", "float32"]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> LLM:
    return LLM(pair.target, dtype="float32", method="vanilla")


# ---- what is wrong with the input -----------------------------------------------------------------------------------

PAIR = ["--target", "{target}", "--draft", "{draft}", "--placement", "inline"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "--target", "{missing}", "--method", "vanilla", "hi"], "there is no folder"),
        (["generate", "--target", "{not_a_model}", "--method", "vanilla", "hi"], "holds no config.json"),
        (["generate", "--target", "{target}", "--draft", "{missing}", "hi"], "there is no folder"),
        (["generate", "--target", "{target}", "--method", "card", "hi"], "give --draft, or --method vanilla"),
        (["generate", "--target", "{missing}", "hi"], "there is no folder {missing}"),  # the target's error comes first
        (["generate", "--target", "{missing}", "--draft", "{not_a_model}", "hi"], "there is no folder {missing}"),
        (["generate", "--target", "{not_a_model}", "--draft", "{missing}", "hi"], "{not_a_model} holds no config.json"),
        (["generate", *PAIR, "--prompt-file", "{missing}"], "does not exist"),
        (["generate", *PAIR, "--prompt-file", "{target}/config.json", "hi"], "the prompt is given twice"),
        (["generate", *PAIR, "--prompt-file", "{target}/model.safetensors"], "is not valid UTF-8"),
        (["generate", "--target", "{target}", "--draft", "{foreign_draft}", "hi"], "share one tokenizer"),
        (["generate", *PAIR, "--raw", "the cat " * 2500], "the context holds 4096"),
        (["generate", *PAIR, "--max-model-len", "8", "one two three four five six"], "the context holds 8"),
        (["generate", *PAIR, "--raw", "--system", "a", "hi"], "--system needs the chat template; leave out --raw"),
        (["generate", *PAIR, ""], "the prompt is empty"),
        (["generate", *PAIR], "the prompt is empty"),
        (["generate", *PAIR, "\udcff"], "not valid text"),
        (["generate", *PAIR, "--temperature", "-1", "hi"], "temperature must be 0 or more, got -1.0"),
        (["generate", *PAIR, "--temperature", "nan", "hi"], "temperature must be 0 or more"),
        (["generate", *PAIR, "--temperature", "warm", "hi"], "'warm' is not a valid float"),
        (["generate", *PAIR, "--method", "magic", "hi"], "unknown method 'magic'; known: "),
        (["generate", *PAIR, "--max-tokens", "-5", "hi"], "--max-tokens must be 1 or more, got -5"),
        (["generate", *PAIR, "--max-tokens", "many", "hi"], "'many' is not a valid integer"),
        (["generate", *PAIR, "--top-p", "0", "hi"], "--top-p must be above 0"),
        (["generate", *PAIR, "--seed", "-1", "hi"], "seed must be"),
        (["generate", *PAIR, "--stop", "", "hi"], "stop must be"),
        (["generate", *PAIR, "--presence-penalty", "2.5", "hi"], "--presence-penalty must be from -2 to 2, got 2.5"),
        (["generate", *PAIR, "--repetition-penalty", "0", "hi"], "--repetition-penalty must be above 0"),
        (
            ["generate", *PAIR, "--max-tokens", "256", "--min-tokens", "300", "hi"],
            "--min-tokens must be from 0 to --max-tokens (256), got 300",
        ),
        (["generate", *PAIR, "--logit-bias", "5:3", "hi"], "a token id and a number such as 5=-100, got '5:3'"),
        (["generate", *PAIR, "--logit-bias", "5=101", "hi"], "the --logit-bias of token 5 must be"),
        (["generate", *PAIR, "--logit-bias", "99999=1", "hi"], "--logit-bias has token 99999, but the target has"),
        (["generate", *PAIR, "--json-schema", "/no/such/file", "hi"], "No such file"),
        (["generate", *PAIR, "--json-object", "--regex", "a", "hi"], "exclude each other"),
        (["generate", *PAIR, "--regex", "(", "hi"], "correct it or leave --regex out"),
        (["generate", *PAIR, "--max-model-len", "2", "a b c d e"], "or raise --max-model-len if"),
        (["generate", *PAIR, "--json-object", "--ignore-eos", "hi"], "--ignore-eos contradicts a required form"),
        (["generate", *PAIR, "--verify", "bush", "hi"], "verify must be one of chain, tree"),
        (["generate", *PAIR, "--beam-width", "0", "hi"], "--beam-width must be from 1 to 256"),
        (["generate", *PAIR, "--placement", "moon", "hi"], "placement must be one of inline, thread, process"),
        (["generate", *PAIR, "--dtype", "int4", "hi"], "unknown dtype 'int4'"),
        (["generate", *PAIR, "--device", "toaster", "hi"], "device 'toaster' is not available"),
        (["generate", *PAIR, "--threads", "0", "hi"], "threads must be from 1 to 1024"),
        (["generate", *PAIR, "--cores", "a,b", "hi"], "core numbers such as 0 or 0,1"),
        (["generate", *PAIR, "--cores", "9999", "hi"], "cores must be among"),
        (["generate", *PAIR, "--draft-vocab", "0", "hi"], "--draft-vocab must be a whole number of 1 or more, got 0"),
        (["generate", *PAIR, "--draft-vocab", "9999", "hi"], "--draft-vocab must be 1 to 299, the number of tokens"),
        (["generate", *PAIR, "--draft-vocab", "many", "hi"], "'many' is not a valid integer"),
        (["generate", *PAIR, "--method", "vanilla", "--draft-vocab", "9", "hi"], " would do nothing"),
        (["generate", *PAIR, "--target-cost", "nonsense", "hi"], "nonsense"),
        (["generate", *PAIR, "--target-cost", "1", "hi"], "1"),
        (["generate", *PAIR, "--colour", "red", "hi"], "No such option"),
        (["generate", *PAIR, "hi", "there"], "unexpected extra argument"),
        (["generate", *PAIR, "--seed"], "requires an argument"),
        (["generate", "\nfirst line\nsecond line\n", "--target", "no\n\nx", "--method", "card"], "give --draft"),
        (["sing"], "No such command 'sing'"),
        (["--loud"], "No such option"),
        (["chat", *PAIR, "--temperature", "-1"], "temperature must be 0 or more"),
        (["chat", "--target", "{missing}", "--method", "vanilla"], "there is no folder"),
        (["demo", "--problems", "0"], "--problems must be from 1"),
        (["demo", "--target", "{target}"], "give --draft"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:30],
)
def test_wrong_input_is_one_line_and_status_2(run, pair, args, said):
    folders = {name: getattr(pair, name) for name in ("target", "draft", "foreign_draft", "missing", "not_a_model")}
    started = time.monotonic()
    assert_one_line(run(*(arg.format(**folders) for arg in args)), said.format(**folders))
    assert time.monotonic() - started < 60


def test_standard_input_that_is_not_utf8_is_one_line_and_status_2(run, models):
    assert_one_line(run("generate", *models, stdin=b"ok so far \xff\xfe"), "byte 0xff at offset 10")
    assert_one_line(run("generate", *models, "-", stdin=b"\xff"), "not valid UTF-8")
    assert_one_line(run("chat", *models, stdin=b"\xff\n"), "not valid UTF-8")
    assert_one_line(run("generate", *models, stdin=None), "no prompt")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Falcon", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("Mpt", {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64}),
    ],
)
def test_a_folder_of_a_family_that_cannot_run_is_refused_in_one_line(
    tmp_path: Path, pair: Pair, run: Callable[..., Ran], kind: str, sizes: dict[str, int]
):
    config = getattr(transformers, f"{kind}Config")(vocab_size=320, **sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    load_tokenizer(pair.target).save(tmp_path)
    ran = run("generate", "--target", str(tmp_path), "--method", "vanilla", "hi")
    assert_one_line(ran, "models compute attention in code of their own, which cannot be taken over; choose a model")


def test_a_model_without_a_chat_template_says_so(run, pair, tmp_path):
    for path in Path(pair.target).iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    args = ["generate", "--target", str(tmp_path), "--method", "vanilla", PROMPT, "--max-tokens", "3"]
    assert_one_line(run(*args), "no chat template")
    assert run(*args, "--raw").status == 0


def test_help_and_version_go_to_standard_output(run):
    for args in ([], ["--help"], ["generate", "-h"], ["--version"]):
        ran = run(*args)
        assert (ran.status, ran.err) == (0, "")
    assert ran.out == f"card, version {card.__version__}\n"
    assert "generate" in run().out


# ---- a CPU without bfloat16 instructions ----------------------------------------------------------------------------


@pytest.fixture
def in_bfloat16(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a pair stored in bfloat16, on a CPU that has no instructions for it and no machine code of ours."""
    say_why_not_int8(monkeypatch, "not here")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    for name in ("target", "draft"):
        folder = getattr(pair, name)
        load_model(folder, dtype="bfloat16").save_pretrained(tmp_path / name)
        load_tokenizer(folder).save(tmp_path / name)
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--max-tokens", "8"]


@needs_onednn
@pytest.mark.parametrize("command", [["demo", "--problems", "1"], ["generate", "--placement", "inline", PROMPT]])
def test_where_bfloat16_is_slow_models_run_in_float32_and_one_line_says_so(run, in_bfloat16, caplog, command):
    said = "weights of 16 bits are widened to float32"
    for options, wanted in [([], 1), (["--dtype", "bfloat16"], 0), (["--dtype", "float32"], 0)]:
        warn_once.cache_clear()
        caplog.clear()
        ran = run(*command, *in_bfloat16, *options)
        assert (ran.status, caplog.text.count(said)) == (0, wanted), options


# ---- what it prints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["inline", "thread"])
def test_the_stream_and_json_give_the_text_of_the_library(run, plain, models, placement):
    args = ["generate", *models, "--placement", placement, "--raw", "--max-tokens", "40", "--temperature", "0.8"]
    args += ["--seed", "5", "--ignore-eos", PROMPT]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    wanted = plain.generate(PROMPT, params)[0].outputs[0]
    streamed, as_json = run(*args), run(*args, "--json")
    assert streamed == Ran(0, wanted.text + "\n", cut_at(40))
    assert (as_json.status, as_json.err) == (0, cut_at(40))
    assert as_json.out.endswith("\n")
    result = json.loads(as_json.out)
    assert (result["text"], result["token_ids"]) == (wanted.text, list(wanted.token_ids))
    assert (result["finish_reason"], result["method"], result["exact"]) == ("length", "card", True)
    assert result["target_cost"] is None
    assert result["stats"].keys() >= STATS_KEYS
    assert (result["stats"]["num_new_tokens"], result["stats"]["seed"]) == (40, 5)
    assert 0 < result["stats"]["prefill_s"] <= result["stats"]["wall_s"]


def test_the_prompt_may_come_from_standard_input(run, models):
    args = ["generate", *models, "--max-tokens", "16"]
    answered = run(*args, PROMPT)
    assert answered.status == 0
    assert run(*args, stdin=PROMPT.encode() + b"\n") == run(*args, "-", stdin=PROMPT.encode()) == answered
    assert run(*args, "--raw", PROMPT) != answered, "without --raw the chat template is used"


def test_the_prompt_may_come_from_a_file(run, models, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    args = ["generate", *models, "--max-tokens", "16"]
    assert run(*args, "--prompt-file", str(path)) == run(*args, PROMPT)


def test_a_byte_order_mark_and_ends_of_lines_change_no_answer(run, models, tmp_path):
    path, schema = tmp_path / "prompt.txt", tmp_path / "schema.json"
    args = ["generate", *models, "--max-tokens", "16"]
    wanted = run(*args, "the cat\n\nsat")
    marked = b"\xef\xbb\xbfthe cat\r\n\r\nsat\r\n"
    path.write_bytes(marked)
    assert run(*args, "--prompt-file", str(path)) == run(*args, stdin=marked) == wanted
    schema.write_bytes(b'\xef\xbb\xbf{"enum": ["cat"]}\r\n')
    assert run(*args, "--json-schema", str(schema), "hi").out == '"cat"\n'
    assert run(*args, "--json-schema", "-", "hi", stdin=schema.read_bytes()).out == '"cat"\n', (
        "it is no part of the prompt"
    )


def test_stats_go_to_standard_error(run, models):
    args = ["generate", *models, "--policy", "fixed", "--max-tokens", "16", "--ignore-eos", PROMPT]
    ran = run(*args, "--stats")
    assert ran.out == run(*args).out
    assert ran.err.startswith("card: 16 tokens, ")
    assert "drafter passes" in ran.err
    cost = run(*args, "--target-cost", "0.2M")
    assert cost.out == ran.out
    assert "inflated" in cost.err, "an inflated target is always labelled"


TURNS = ("--placement", "inline", "--schedule", "turns")
BESIDE = ("--policy", "fixed", "--placement", "thread", "--max-wait-s", "20", "--min-depth", "2", "--lead", "2")


@pytest.mark.parametrize(("where", "shape"), [(TURNS, "chain"), (BESIDE, "tree")], ids=["turns", "beside"])
def test_stats_say_chain_or_tree_and_what_was_drafted_and_what_was_copied(run, pair, where, shape):
    models = ("--target", pair.target, "--draft", pair.target, "--dtype", "float32", "--writers", "beam,suffix")
    args = ["generate", *models, *where, "--max-tokens", "48", "--ignore-eos", PROMPT]
    stats = json.loads(run(*args, "--json").out)["stats"]
    assert (stats["draft_shape"], stats["schedule"]) == (shape, "turns" if where is TURNS else "beside")
    assert (stats["drafted_trees"] > stats["drafted_chains"]) == (shape == "tree")
    assert sum(stats["accepted_shares"].values()) == pytest.approx(1.0) and stats["drafted_share"] > 0.0
    ran = run(*args, "--stats")
    assert f"schedule {stats['schedule']}, drafted a {shape}" in ran.err
    counted = re.search(r"accepted (\d+): (\d+% drafted .*?), schedule", ran.err)
    assert counted is not None, ran.err
    counts = dict(re.findall(r"([a-z+]+) (\d+)(?=[,)])", counted[2]))
    assert sum(map(int, counts.values())) == int(counted[1]) and counts.keys() <= {"beam", "suffix", "beam+suffix"}


def test_chat_remembers_until_it_is_cleared(run, plain, models):
    turns = ["hello", "and then?", "/reset", "hello again"]
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=0)
    messages: list[dict[str, str]] = []
    wanted = ""
    for turn in turns:
        if turn == "/reset":
            messages = []
            continue
        messages.append({"role": "user", "content": turn})
        answer = plain.chat(messages, params)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        wanted += answer + "\n"
    ran = run("chat", *models, "--max-tokens", "12", "--stats", stdin=b"\xef\xbb\xbf" + "\r\n\r\n".join(turns).encode())
    assert (ran.status, ran.out) == (0, wanted)
    assert ran.err.count("card: ") - ran.err.count(cut_at(12)) == 3


def test_a_system_prompt_stands_before_what_is_asked(run, plain, models):
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=0)

    def answered(*messages: tuple[str, str]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return plain.chat(turns, params)[0].outputs[0].text + "\n"

    asked = ("user", "hello")
    short, shorter, alone = (
        answered(*messages)
        for messages in ([("system", "Be short."), asked], [("system", "Be\nshorter."), asked], [asked])
    )
    assert len({short, shorter, alone}) == 3
    args = [*models, "--max-tokens", "12", "--system", "Be short."]
    assert run("generate", *args, "hello").out == short
    typed = ["hello", "/system", "/reset", "/system Be\\", "shorter.", "hello", "/reset", "/system none", "hello"]
    ran = run("chat", *args, stdin="\n".join(typed).encode())
    assert (ran.status, ran.out) == (0, short + shorter + alone)
    lines = [line for line in ran.err.splitlines() if "cut off" not in line]
    assert lines == ["Be short.", "(forgotten)", "(the system prompt is set)", "(forgotten)", "(no system prompt)"]


def test_chat_names_commands_that_it_does_not_know_instead_of_saying_them(run, plain, models):
    ran = run("chat", *models, "--max-tokens", "4", stdin=b"/foo bar\n/reset all\n/quit\nnever said\n")
    assert (ran.status, ran.out) == (0, "")
    first, second = ran.err.splitlines()
    assert first.startswith("card: there is no /foo; /help lists the commands")
    assert second == "card: /reset takes no text, got 'all'"


def test_what_is_piped_in_follows_the_prompt(run, models):
    args = ["generate", *models, "--max-tokens", "16"]
    joined = run(*args, "the cat\n\nsat")
    assert run(*args, "the cat", stdin=b"sat\n") == joined != run(*args, "the cat")


def test_chat_goes_on_after_a_message_that_does_not_fit(run, models):
    ran = run("chat", *models, "--max-model-len", "32", stdin=b"word " * 50 + b"\nhi\n")
    assert ran.status == 0
    assert "/reset forgets" in ran.err
    assert ran.out.endswith("\n")


# ---- a process of its own -------------------------------------------------------------------------------------------


def test_the_command_runs_with_a_drafter_process_and_leaves_none(pair, plain):
    args = ["generate", "--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--max-tokens", "32"]
    args += ["--wait-for-drafter"]  # else the text may be there before the drafter is
    ran = subprocess.run(
        [*RUN, *args, "--json", "--stats"],
        input=PROMPT.encode(),
        env=child_env(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ran.returncode, unhurried(ran.stderr.decode())) == (0, cut_at(32))
    result = json.loads(ran.stdout)
    params = SamplingParams(temperature=0.0, max_tokens=32, seed=0)
    wanted = plain.chat([{"role": "user", "content": PROMPT}], params)[0].outputs[0]
    assert (result["text"], result["token_ids"]) == (wanted.text, list(wanted.token_ids))
    assert result["stats"]["drafter_state"] == "up"


def test_wrong_input_in_a_process_of_its_own_is_one_line_too(pair):
    ran = subprocess.run(
        [*RUN, "generate", "--target", pair.missing, "--draft", pair.missing, "hi"],
        env=child_env(),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert_one_line(Ran(ran.returncode, ran.stdout.decode(), unhurried(ran.stderr.decode())), "there is no folder")


# Nothing is measured, and each of thousands of tokens is paid for.
ENDLESS = ("--method", "vanilla", "--max-tokens", "4000", "--ignore-eos", "--raw", "--target-cost", "5M")
ENDLESS += ("--policy", "fixed", "--threads", "1", PROMPT)


@pytest.fixture
def endless(pair: Pair) -> Iterator[subprocess.Popen[bytes]]:
    """The command in the middle of a long text, with pipes for its output."""
    running = subprocess.Popen(
        [*RUN, "generate", "--target", pair.target, *ENDLESS],
        env=child_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None and running.stdout.read(1)
    yield running
    running.kill()
    running.communicate()


def test_an_interrupt_ends_with_status_130_and_without_a_word(endless):
    endless.send_signal(signal.SIGINT)
    _, err = endless.communicate(timeout=PATIENCE_S)
    assert (endless.returncode, unhurried(err.decode())) == (130, "")


def test_a_reader_that_goes_away_ends_the_command_quietly(endless):
    endless.stdout.close()
    assert unhurried(endless.stderr.read().decode()) == ""
    assert endless.wait(PATIENCE_S) == 1

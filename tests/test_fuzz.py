"""Files and messages that were damaged load, or are refused in one line: nothing crashes, hangs or looks elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from card.api.llm import LLM
from card.config import SamplingParams
from card.drafting.messages import Close, Hello, Open, Ping, Pong, TargetMessage, decode, encode
from card.errors import ProtocolError
from tests.drafts import draft_spec
from tests.fuzzing import NUM_CASES, altered, as_json, changed_bytes, changed_documents, ends_well, share
from tests.gguf_entries import Changed, Parts, changed_parts
from tests.gguf_files import demo_tokenizer, save_model, write_gguf
from tests.links.serving import RawClient, correction, make_server
from tests.pair import make_tokenizer
from tests.tiny import LLAMA3, NO_ENDS, SIZES
from tests.toy import TableModel

pytestmark = pytest.mark.timeout(0 if NUM_CASES else 240)

_SIZES = {**SIZES, "max_position_embeddings": 256, **NO_ENDS, "eos_token_id": [0, 1]}
# Walked directly, and through the modules of transformers: windows, learned positions, experts.
_KINDS: dict[str, dict[str, Any]] = {
    "Llama": {**_SIZES, "rope_parameters": LLAMA3},
    "Qwen2": _SIZES,
    "Qwen3": {**_SIZES, "head_dim": 8},
    "Mistral": {**_SIZES, "sliding_window": 16},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0},
    "Gemma2": {**_SIZES, "head_dim": 8, "sliding_window": 16},
    "Mixtral": {**_SIZES, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind; not to be changed."""
    tokenizer, made = make_tokenizer(), {}
    for kind, sizes in _KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **sizes)
        torch.manual_seed(1)
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        model = getattr(transformers, name)(config)
        model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
        model.save_pretrained(made[kind], max_shard_size="20KB" if kind == "Qwen2" else "1GB")
        tokenizer.save_pretrained(made[kind])
    return made


def use(name: str | Path) -> None:
    """Load a model and let it write."""
    with LLM(str(name), method="vanilla", max_model_len=32, cache=False) as llm:
        params = SamplingParams(max_tokens=3, temperature=0.0, stop=("cat",), seed=1)
        llm.generate("the cat", params)
        if llm.host.tokenizer.chat_template:
            llm.generate([[{"role": "user", "content": "the cat"}]], params)
        SamplingParams(**llm.host.sampling_defaults)


@pytest.mark.parametrize("kind", _KINDS)
def test_what_is_not_changed_is_used(folders: dict[str, Path], kind: str):
    use(folders[kind])


@pytest.mark.parametrize("kind", _KINDS)
def test_a_changed_config_is_used_or_refused(folders: dict[str, Path], kind: str):
    good = json.loads((folders[kind] / "config.json").read_text())

    @share(4)
    @given(changed=changed_documents(good))
    def check(changed: Any) -> None:
        with altered(folders[kind], "config.json", as_json(changed)) as folder:
            ends_well(lambda: use(folder), folder)

    check()


@pytest.mark.parametrize(
    ("name", "percent"),
    [("generation_config.json", 9), ("tokenizer.json", 14), ("tokenizer_config.json", 12)],
)
def test_a_changed_file_of_settings_is_used_or_refused(folders: dict[str, Path], name: str, percent: int):
    good = json.loads((folders["Llama"] / name).read_text())

    @share(percent)
    @given(changed=changed_documents(good))
    def check(changed: Any) -> None:
        with altered(folders["Llama"], name, as_json(changed)) as folder:
            ends_well(lambda: use(folder), folder)

    check()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_with_other_bytes_is_used_or_refused(folders: dict[str, Path], name: str):
    good = (folders["Llama"] / name).read_bytes()

    @share(2)
    @given(changed=changed_bytes(good))
    def check(changed: bytes) -> None:
        with altered(folders["Llama"], name, changed) as folder:
            ends_well(lambda: use(folder), folder)

    check()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_weights_with_another_header_are_used_or_refused(folders: dict[str, Path], kind: str):
    content = (folders[kind] / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])

    def with_header(changed: Any) -> bytes:
        text = as_json(changed)
        return len(text).to_bytes(8, "little") + text + content[start:]

    @share(6)
    @given(changed=changed_documents(header).map(with_header) | changed_bytes(content, start))
    def check(changed: bytes) -> None:
        with altered(folders[kind], "model.safetensors", changed) as folder:
            ends_well(lambda: use(folder), folder)

    check()


def test_weights_with_another_index_are_used_or_refused(folders: dict[str, Path]):
    name = "model.safetensors.index.json"
    good = json.loads((folders["Qwen2"] / name).read_text())

    @share(5)
    @given(changed=changed_documents(good).map(as_json) | changed_bytes(as_json(good)))
    def check(changed: bytes) -> None:
        with altered(folders["Qwen2"], name, changed) as folder:
            ends_well(lambda: use(folder), folder)

    check()


# What files have: blocks of the only format whose scales are exponents, experts, lists of layers, factors of angles.
_FILES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "llama": (Kind.F32, {}),
    "llama, other heads": (Kind.MXFP4, {}),
    "qwen3_moe": (Kind.Q8_0, {"joins_experts": True}),
    "mixtral": (Kind.Q4_0, {"joins_experts": None}),
    "qwen2_moe": (Kind.Q5_1, {"metadata": {"nextn_predict_layers": 0}}),
    "lfm2": (Kind.Q8_0, {}),
    "qwen3, yarn": (Kind.Q4_0, {}),
    "phi3, longrope": (Kind.Q4_1, {"other_cuts": True}),
    "glm4_moe": (Kind.Q8_0, {}),
    "ernie4_5_moe": (Kind.Q8_0, {}),
    "granitemoeshared": (Kind.Q8_0, {}),
    "ministral3": (Kind.Q4_0, {}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GGUF file of each kind; not to be changed."""
    made = {}
    for name, (kind, options) in _FILES.items():
        folder = tmp_path_factory.mktemp("folder")
        save_model(folder, name, demo_tokenizer(), sizes={"hidden_size": 256} if name == "qwen3_moe" else None)
        made[name] = write_gguf(folder, folder / "good.gguf", kind=kind, **options)
    return made


@pytest.mark.parametrize("name", _FILES)
def test_a_gguf_file_with_other_bytes_is_used_or_refused(files: dict[str, Path], tmp_path: Path, name: str):
    use(files[name])
    good, file = files[name].read_bytes(), tmp_path / "changed.gguf"

    @share(3)
    @given(changed=changed_bytes(good, 900))
    def check(changed: bytes) -> None:
        file.write_bytes(changed)
        ends_well(lambda: use(file), file.parent)

    check()


@pytest.mark.parametrize("name", _FILES)
def test_a_gguf_file_with_other_entries_or_types_is_used_or_refused(files: dict[str, Path], tmp_path: Path, name: str):
    parts, file = Parts.of(files[name]), tmp_path / "changed.gguf"
    (architecture,) = {one.partition(".")[0] for one in parts.entries if one.endswith(".block_count")}
    assert parts.content() == files[name].read_bytes()

    @share(3)
    @given(changed=changed_parts(parts, architecture))
    def check(changed: Changed) -> None:
        file.write_bytes(changed.content)
        ends_well(lambda: use(file), file.parent)

    check()


def test_a_model_in_parts_with_other_entries_is_used_or_refused(tmp_path: Path):
    (tmp_path / "parts").mkdir()
    save_model(tmp_path / "folder", "llama", demo_tokenizer())
    first = write_gguf(tmp_path / "folder", tmp_path / "parts" / "model.gguf", kind=Kind.Q8_0, part_tensors=8)
    use(first)
    good = {file: (file.read_bytes(), Parts.of(file)) for file in sorted(first.parent.iterdir())}

    @share(3)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        spoilt = data.draw(st.sampled_from([*good]))
        content, parts = good[spoilt]
        spoilt.write_bytes(
            data.draw(changed_parts(parts, "llama").map(lambda one: one.content) | changed_bytes(content, 200))
        )
        ends_well(lambda: use(first), first.parent)
        spoilt.write_bytes(content)

    check()


# ---- messages -------------------------------------------------------------------------------------------------------

_MESSAGES: tuple[TargetMessage, ...] = (
    Hello(),
    Open(1, (1, 2, 3), draft_spec()),
    correction(1, 3, 4, 5),
    Ping(7),
    Close(1),
)


def _frames() -> st.SearchStrategy[bytes]:
    """Frames of a client, changed in what they say or in their bytes."""

    def changed(message: TargetMessage) -> st.SearchStrategy[bytes]:
        frame = encode(message, 1)
        return changed_documents(msgspec.msgpack.decode(frame)).map(_packed) | changed_bytes(frame, len(frame))

    return st.sampled_from(_MESSAGES).flatmap(changed)


def _packed(document: Any) -> bytes:
    """Return a document as msgpack; numbers and texts that it cannot hold become others."""
    try:
        return msgspec.msgpack.encode(document)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        return msgspec.msgpack.encode(repr(document)[:200].encode("utf-8", "replace"))


@pytest.fixture(scope="module")
def server_and_client() -> Iterator[tuple[Any, RawClient, RawClient]]:
    """A draft server that is run by hand, one client that sends anything and one that behaves."""
    server = make_server(TableModel(0))
    with RawClient(server.address) as odd, RawClient(server.address) as good:
        yield server, odd, good
    server.close()


def test_a_changed_message_of_a_client_costs_nobody_else_anything(
    server_and_client: tuple[Any, RawClient, RawClient],
):
    server, odd, good = server_and_client

    @share(20)
    @given(frames=st.lists(_frames(), min_size=1, max_size=3))
    def check(frames: list[bytes]) -> None:
        for frame in frames:
            try:
                decode(frame)
            except ProtocolError as error:
                assert len(str(error).splitlines()) == 1
        odd.say(Hello(), *_MESSAGES[1:3])
        odd.send(*frames[:1])
        for frame in frames[1:]:
            odd.send(frame)
        good.say(Hello(), Ping(5))
        answers: list[Any] = []
        for _ in range(200):
            server.serve_once(5)
            answers += good.heard()
            if Pong(5) in answers:
                break
        assert Pong(5) in answers
        odd.heard()

    check()

"""Places of images: their keys, their angles and their features are what they should be, row by row."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from card.backends.transformers.loading import load_model
from card.backends.vision.tower import VisionTower
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.models.images import PlacedImages, PromptImage
from card.models.loading import load_decoder, load_vision_tower
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.seeing import picture, save_seeing

IMAGE_ID = 3


def image(name: str, height: int, width: int) -> PromptImage:
    return PromptImage(hashlib.sha256(name.encode()).digest(), {}, (height, width))


def placed(*parts: PromptImage | int) -> tuple[list[int], PlacedImages]:
    """Return a text of images and runs of so many tokens, and its images."""
    token_ids: list[int] = []
    starts: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, int):
            token_ids += [7 + idx for idx in range(part)]
        else:
            starts.append(len(token_ids))
            images.append(part)
            token_ids += [IMAGE_ID] * part.num_tokens
    return token_ids, PlacedImages(tuple(images), tuple(starts))


@pytest.mark.parametrize("shape", [(2, 5), (5, 2), (1, 1), (4, 4)])
def test_positions_in_height_and_width_are_those_of_transformers(shape: tuple[int, int]):
    token_ids, images = placed(3, image("a", *shape), 2, image("b", 3, 2), 4)
    vision = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "spatial_merge_size": 2}
    config = transformers.Qwen2VLConfig(vision_config=vision)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLModel.__new__(
        transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLModel
    )
    torch.nn.Module.__init__(model)
    model.config = config
    ids = torch.tensor([token_ids])
    grids = torch.tensor([[1, 2 * one.grid[0], 2 * one.grid[1]] for one in images.images])
    expected, delta = model.get_rope_index(ids, (ids == IMAGE_ID).int(), image_grid_thw=grids)
    places = np.arange(len(token_ids) + 5)
    found = images.rotary_positions(places)
    np.testing.assert_array_equal(found[:, : len(token_ids)], expected[:, 0].numpy())
    np.testing.assert_array_equal(found[:, len(token_ids) :], np.tile(places[len(token_ids) :] + int(delta), (3, 1)))


def test_keys_are_equal_for_equal_images_alone_and_no_key_of_a_place_is_a_token():
    token_ids, images = placed(3, image("a", 2, 3), 2, image("b", 1, 2), 4)
    _, same = placed(3, image("a", 2, 3), 2, image("c", 1, 2), 4)
    keys, others = images.keyed(token_ids), same.keyed(token_ids)
    np.testing.assert_array_equal(keys[:11], others[:11])
    assert (keys[11:13] != others[11:13]).all()
    assert (keys[3:9] < 0).all()
    assert keys[:3].tolist() == token_ids[:3]
    np.testing.assert_array_equal(images.keyed(token_ids[:5]), keys[:5])
    assert images.left_out_of(token_ids) == token_ids[:3] + token_ids[9:11] + token_ids[13:]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VisionTower]:
    folder = tmp_path_factory.mktemp("llava")
    save_seeing("llava", folder)
    return folder, load_vision_tower(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_transformers_modules_and_our_own_pass_see_the_same(llava: tuple[Path, VisionTower]):
    folder, tower = llava
    prompt = tower.place([9, 11, tower.image_token_id, 12, 13], [tower.prepare(picture(1))])
    logits = []
    for own_pass in (True, False):
        runner = plain_runner(load_model(folder), max_model_len=64, own_pass=own_pass)
        runner.see_with(tower)
        slot, unseen = runner.open(), runner.open()
        runner.show(slot, prompt.images)
        chain = range(-1, len(prompt) - 1)
        logits.append(runner.forward([Extension(slot, prompt, chain), Extension(unseen, prompt, chain)]))
    for ours, theirs in zip(*logits, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not np.allclose(logits[0][0][-1], logits[0][1][-1], atol=0.01)


def test_positions_of_two_axes_are_refused_where_they_cannot_be_run(tmp_path: Path):
    save_seeing("qwen2_vl", tmp_path)
    tower = load_vision_tower(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ModelError, match="positions in height and width need the own pass, and it runs in"):
        plain_runner(load_model(tmp_path), max_model_len=64, own_pass=False).see_with(tower)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_beside_images_have_the_same_bits_however_they_are_read(tmp_path: Path, dtype: str):
    if (reason := why_not_int8()) is not None:
        pytest.skip(f"no integer passes: {reason}")
    save_seeing("qwen2_vl", tmp_path)
    tower = load_vision_tower(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    prompt = tower.place([9, 11, tower.image_token_id, 12, 13], [tower.prepare(picture(1))])
    runner = plain_runner(load_decoder(tmp_path, dtype=dtype), max_model_len=64)
    runner.see_with(tower)
    whole, cut, unseen, text = (runner.open() for _ in range(4))
    runner.show(whole, prompt.images)
    runner.show(cut, prompt.images)
    chain = range(-1, len(prompt) - 1)
    (expected,) = runner.forward([Extension(whole, prompt, chain)])
    (plain,) = runner.forward([Extension(unseen, prompt, chain)])
    parts = []
    for start in range(0, len(prompt), 3):
        rows = slice(start, min(start + 3, len(prompt)))
        both = [Extension(slot, prompt[rows], chain[rows]) for slot in (cut, text)]
        parts.append(runner.forward(both))
    found, beside = (np.concatenate(one) for one in zip(*parts, strict=True))
    assert np.array_equal(found, expected) and np.array_equal(beside, plain)
    assert not np.allclose(found[-1], plain[-1], atol=0.01)

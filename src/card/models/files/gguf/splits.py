"""Rules that cut a text before byte-level tokenizers join pairs, by the names that llama.cpp gives them.

Facts from each model's tokenizer.json and from llama.cpp's table of names (src/llama-vocab.cpp). Several patterns are
applied one after the other, each to the pieces that the one before left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class SplitRule:
    """One way to cut a text, and what goes with it unless the file says otherwise."""

    patterns: tuple[str, ...]
    looks_up_words: bool = False  # a whole piece that is a token stays one, without a look at the merges
    begins_with_bos: bool = False
    composes: bool = False  # letters and their accents become one character first (NFC)

    def pre_tokenizer(self) -> PreTokenizer:
        """Return what cuts a text into pieces and spells their bytes."""
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Normalizer | None:
        """Return what changes the text before it is cut."""
        return normalizers.NFC() if self.composes else None


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CHINESE_AND_KOREAN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# What DeepSeek LLM's tokenizer.json lists letter by letter: those with capitals, but for Georgian and mathematics.
_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{10D0}-\x{10FF}\x{1D400}-\x{1D7FF}]]"

_UP_TO_SIGNS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"


def _words(digits: str, *, contractions: str = f"{_CONTRACTIONS}|", marks: str = "") -> str:
    """Return the pattern of Llama 3 and its relatives, which differ in how many digits make a piece.

    Args:
        marks: the class of accents that stand alone, if they belong to words.
    """
    letters, signs = rf"[\p{{L}}{marks}]+", rf" ?[^\s\p{{L}}{marks}\p{{N}}]+"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{signs}[\r\n]*|{_LINES_AND_BLANKS}"


def _cased_words(
    digits: str, *, contractions: str = "", upper: str = _UPPER, lower: str = _LOWER, behind_signs: str = r"\r\n/"
) -> str:
    """Return the pattern of Tekken and GPT-4o: a word ends where small letters are followed by a capital."""
    before = r"[^\r\n\p{L}\p{N}]?"
    small, capital = f"{before}{upper}*{lower}+{contractions}", f"{before}{upper}+{lower}*{contractions}"
    return rf"{small}|{capital}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{behind_signs}]*|{_LINES_AND_BLANKS}"


def _kimi_words() -> str:
    """Return the pattern of Kimi: as GPT-4o's, but Chinese characters are words of their own."""
    upper, lower = (f"[{letters}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
    words = _cased_words(
        r"\p{N}{1,3}", contractions=f"{_CONTRACTIONS}?", upper=upper, lower=lower, behind_signs=r"\r\n"
    )
    return rf"\p{{Han}}+|{words}"


_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|"
    rf"{_LINES_AND_BLANKS}",
)
_BY_NAMES = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": SplitRule(
        _LLAMA3, looks_up_words=True, begins_with_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": SplitRule(_LLAMA3),
    "minicpm5": SplitRule((r"\p{N}{1,3}", _words(r"\p{N}+")), looks_up_words=True),
    "qwen2": SplitRule(_QWEN2, composes=True),
    "qwen35": SplitRule((_words(r"\p{N}", marks=r"\p{M}"),), composes=True),
    "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": SplitRule(_QWEN2),
    "ufakzeka": SplitRule((_words(r"\p{N}", contractions=""),)),
    "seed-coder": SplitRule(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_BLANKS}",)
    ),
    "tekken": SplitRule((_cased_words(r"\p{N}"),), looks_up_words=True, begins_with_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": SplitRule(
        (_cased_words(r"\p{N}{1,3}", contractions=f"{_CONTRACTIONS}?"),)
    ),
    "kimi-k2": SplitRule((_kimi_words(),), looks_up_words=True),  # Moonshot's own, not llama.cpp's simpler one
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": SplitRule((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": SplitRule((r"\p{N}", _GPT2)),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _CHINESE_AND_KOREAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_KOREAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": SplitRule(_DEEPSEEK3),
    "poro-chat bloom gpt3-finnish": SplitRule((_UP_TO_SIGNS,)),
    "viking": SplitRule((_UP_TO_SIGNS, r"\p{N}")),
}
UNNAMED = "default"  # the rule of files that name none
RULES = {name: rule for names, rule in _BY_NAMES.items() for name in names.split()}

"""CARD around an engine of ONNX Runtime GenAI: the public door of `card.inside.onnx`."""

from card.inside.onnx.engine import SpeculativeEngine

__all__ = ["SpeculativeEngine"]

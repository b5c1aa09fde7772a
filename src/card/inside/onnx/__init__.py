"""CARD around an engine of ONNX Runtime GenAI."""

from card.inside.onnx.engine import SpeculativeEngine

__all__ = ["SpeculativeEngine"]

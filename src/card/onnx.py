"""`card.onnx.SpeculativeEngine`: the public door of `card.inside.onnx`."""

from card.inside.onnx import *  # noqa: F403

"""CARD around an engine of ONNX Runtime GenAI."""

"""Vision towers of multimodal models."""

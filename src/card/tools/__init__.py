"""Commands beside the main job: measuring, planning, checking."""

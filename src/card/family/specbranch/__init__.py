"""SpecBranch, and H-RAD, its predictor of rejections."""

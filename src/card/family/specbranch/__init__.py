"""H-RAD, the network that SpecBranch asks where a draft will be rejected."""

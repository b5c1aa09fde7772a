"""Pictures of prompts, read within bounds; needs the extra `images`."""

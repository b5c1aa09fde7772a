"""Pictures of prompts, read within bounds; needs `pip install 'card-decoding[images]'`."""

"""Between text and token ids: prompts and chat templates, text out of tokens, grammars over tokens."""

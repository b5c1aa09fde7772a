"""Keep your transformers code and decode with CARD: one argument more, the same text."""

from card.machine.packages import install_command
from card.models.demo import demo_folder

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import card.hf
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is not installed: {install_command('torch')}") from None

tokenizer = AutoTokenizer.from_pretrained(demo_folder("target"))
target = AutoModelForCausalLM.from_pretrained(demo_folder("target"), dtype=torch.float32)
draft = AutoModelForCausalLM.from_pretrained(demo_folder("draft"), dtype=torch.float32)

problem = "Anna has 25 apples. She eats 3 apples and gives 6 apples to a friend. How many apples does she have left?"
question = [{"role": "user", "content": problem}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": 100, "do_sample": False, "return_dict_in_generate": True}

fast = target.generate(**inputs, **options, custom_generate=card.hf.generate, assistant_model=draft)
slow = target.generate(**inputs, **options)

print(tokenizer.decode(fast.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{fast.stats[0].mean_acceptance_length:.1f} tokens per target pass")
assert torch.equal(fast.sequences, slow.sequences)

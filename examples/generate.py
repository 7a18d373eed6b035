"""Fill a long prompt in Python: `python examples/generate.py MODEL MAPS PROMPT.txt`."""

import sys

import ridgefill
from ridgefill.answer import prompt_ids


def main(model_name: str, maps_name: str, prompt_file: str) -> None:
    """Generates twice, filled and exact, and says what was filled."""
    model, tokenizer = ridgefill.load_model(model_name)
    maps = ridgefill.RidgeMaps.load(maps_name)
    with open(prompt_file, encoding="utf-8") as file:
        ids = prompt_ids(tokenizer, file.read()).to(model.device)

    with ridgefill.filling(model, maps, tail=1024, tokenizer=tokenizer) as f:
        filled = model.generate(ids, max_new_tokens=64, do_sample=False)
    print(f.stats)

    exact = model.generate(ids, max_new_tokens=64, do_sample=False)  # outside the block: the model as it was
    for name, out in (("filled", filled), ("exact", exact)):
        print(f"{name}: {tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:4])

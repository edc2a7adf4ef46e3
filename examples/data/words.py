"""Writes words.jsonl: words to say backwards, with an answer that is right and one that has a wrong letter.

    python examples/data/words.py
"""

import json
import random
from pathlib import Path

LETTERS = "abcdefghij"
rng = random.Random(0)
words: set[str] = set()
while len(words) < 1700:
    words.add("".join(rng.choices(LETTERS, k=rng.randint(3, 6))))
with Path(__file__).with_name("words.jsonl").open("w") as file:
    for word in rng.sample(sorted(words), len(words)):
        right = word[::-1]
        at, foreign = rng.randrange(len(word)), rng.choice(sorted(set(LETTERS) - set(word)))
        wrong = right[:at] + foreign + right[at + 1 :]
        row = {"word": word, "prompt": f"{word} backwards: ", "response": right, "rejected": wrong}
        file.write(json.dumps(row) + "\n")

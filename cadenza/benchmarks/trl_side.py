"""The tasks of `cadenza bench trl`, and the side of it that TRL runs.

    .venv-trl/bin/python -P trl_side.py < run.json       the last line that it prints is the result, as JSON

TRL has a virtual environment of its own, so this module imports nothing of Cadenza, and nothing heavy before a run
begins. `-P` keeps this directory off the path, where `trl` would mean the module next to this one.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

LETTERS = "abcdefghijklmnop"
KNOWN = 0.3
"""Share of the letters, and of the lengths, that are right in the examples of the cold start."""
LONG = 64
SYSTEM = "Answer with a number."
"""The system message of the sums."""


@cache
def drawn(seed: int) -> tuple[str, int]:
    """Draw a letter, and how often a short answer has to repeat it."""
    rng = random.Random(seed)
    return rng.choice(LETTERS), rng.randint(3, 7)


@dataclass(frozen=True)
class LoraSize:
    """The adapter that both sides train, to all linear layers but the head, without dropout."""

    r: int
    alpha: int


@dataclass(frozen=True)
class BenchTask:
    """A single-turn task with a verifiable reward."""

    name: str
    max_tokens: int
    steps: int
    groups: int
    """Groups (prompts) of a batch."""
    lr: float
    last: int
    """Last steps over which the reward is averaged."""
    rounds: int
    """How often each side runs it, unless told otherwise."""
    lora: LoraSize | None = None

    def rows(self, bench_run: BenchRun) -> list[dict[str, Any]]:
        """Return the rows in the order of training: `prompt`, a text or messages, and `answer`."""
        raise NotImplementedError

    def reward(self, answer: str, written: str) -> float:
        """Score a text against the right answer."""
        raise NotImplementedError


class LetterTask(BenchTask):
    """Write a letter as often as the prompt says."""

    def rows(self, bench_run: BenchRun) -> list[dict[str, Any]]:
        seeds = range(bench_run.first_seed, bench_run.first_seed + bench_run.steps * bench_run.groups)
        prompts = [self.prompt(seed) for seed in seeds]
        return [{"prompt": prompt, "answer": self.answer(prompt)} for prompt in prompts]

    def prompt(self, seed: int) -> str:
        letter, times = drawn(seed)
        return f"Write {letter} {times} times: " if self.name == "short" else f"Write {letter}: "

    def answer(self, prompt: str) -> str:
        """Return the right answer to a prompt."""
        words = prompt.split()
        return words[1] * int(words[2]) if self.name == "short" else words[1][0] * LONG

    def reward(self, answer: str, written: str) -> float:
        """Return the share of positions with the right letter."""
        same = sum(a == b for a, b in zip(answer, written, strict=False))
        return same / max(len(answer), len(written))

    def example(self, prompt: str, rng: random.Random) -> str:
        """Return an answer of the right form: its length and each letter are right with probability KNOWN."""
        expected = self.answer(prompt)
        length = rng.randint(3, 7) if self.name == "short" and rng.random() >= KNOWN else len(expected)
        return "".join(expected[0] if rng.random() < KNOWN else rng.choice(LETTERS) for _ in range(length))


class SumTask(BenchTask):
    """Add two digits, after one solved sum, in the chat format of a real model."""

    def rows(self, bench_run: BenchRun) -> list[dict[str, Any]]:
        with open(bench_run.data, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        system = {"role": "system", "content": SYSTEM}
        return [{"prompt": [system, *row["messages"]], "answer": row["answer"]} for row in rows]

    def reward(self, answer: str, written: str) -> float:
        """As Cadenza's reward `exact`: white space does not count."""
        return float(" ".join(written.split()) == answer)


TASKS: dict[str, LetterTask | SumTask] = {
    task.name: task
    for task in (
        LetterTask("short", max_tokens=10, steps=100, groups=8, lr=5e-4, last=20, rounds=3),
        LetterTask("long", max_tokens=LONG, steps=50, groups=8, lr=5e-4, last=20, rounds=3),
        SumTask("smollm2", max_tokens=4, steps=24, groups=4, lr=3e-4, last=8, rounds=1, lora=LoraSize(16, 32)),
    )
}
"""Short answers end with the end token (6 tokens on average), long ones at 64 tokens; both are of a tiny model.
`smollm2` is of the real model SmolLM2-135M-Instruct."""


@dataclass(frozen=True)
class BenchRun:
    """One run, for either side."""

    task: str
    model: str
    """Directory with weights and tokenizer."""
    out: str
    seed: int
    steps: int
    groups: int
    """Groups (prompts) of a batch."""
    lr: float
    data: str = ""
    """File with the rows of `smollm2`, in the order of training."""
    group_size: int = 8
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    warm_up: int = 3
    """First steps whose time does not count."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the trainer."""

    @property
    def batch_size(self) -> int:
        return self.groups * self.group_size

    @property
    def first_seed(self) -> int:
        """First seed of the prompts."""
        return self.seed * 1_000_000


@dataclass
class BenchRunResult:
    """The figures of a run: a value for every step."""

    rewards: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Mean length of the completions, end tokens included."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the process and its children when the step was done."""
    wall: list[float] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def mark(self) -> None:
        """Record the CPU and wall time at the end of a step."""
        self.cpu.append(cpu_seconds())
        self.wall.append(time.monotonic())

    def print(self) -> None:
        self.versions |= {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps(asdict(self)), flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process, all its threads, and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def settings(bench_run: BenchRun, task: BenchTask) -> dict[str, Any]:
    """Return the arguments of GRPOConfig: the same algorithm, and the fastest options on a CPU."""
    the_same = {
        "num_generations": bench_run.group_size,
        "per_device_train_batch_size": bench_run.batch_size,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "max_steps": bench_run.steps,
        "max_completion_length": task.max_tokens,
        "temperature": 1.0,
        "learning_rate": bench_run.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": bench_run.betas[0],
        "adam_beta2": bench_run.betas[1],
        "weight_decay": 0.0,
        "max_grad_norm": bench_run.max_grad_norm,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over all tokens of the batch, TRL's default
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "seed": bench_run.seed,
    }
    fast = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return the_same | fast | bench_run.options


def train(bench_run: BenchRun) -> BenchRunResult:
    """Run GRPOTrainer; returns its figures."""
    torch, transformers, datasets, trl = map(import_module, ("torch", "transformers", "datasets", "trl"))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    task, result = TASKS[bench_run.task], BenchRunResult(versions={"trl": version("trl")})

    def reward(completions: Sequence[Any], completion_ids: Any, answer: Sequence[str], **_: Any) -> list[float]:
        written = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        rewards = [task.reward(*pair) for pair in zip(answer, written, strict=True)]
        result.rewards.append(sum(rewards) / len(rewards))
        result.tokens.append(sum(map(len, completion_ids)) / len(completion_ids))
        return rewards

    def on_step_end(*_: Any, **__: Any) -> None:
        result.mark()

    clock = type("Clock", (transformers.TrainerCallback,), {"on_step_end": on_step_end})()
    trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(bench_run.model, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(bench_run.model, padding_side="left"),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=bench_run.out, **settings(bench_run, task)),
        train_dataset=datasets.Dataset.from_list(task.rows(bench_run)),
        callbacks=[clock],
        peft_config=None if task.lora is None else adapter(task.lora, result),
    ).train()
    return result


def adapter(size: LoraSize, result: BenchRunResult) -> Any:
    """Return the adapter's config for peft, and note peft's version."""
    result.versions["peft"] = version("peft")
    return import_module("peft").LoraConfig(
        r=size.r, lora_alpha=size.alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )


if __name__ == "__main__":
    train(BenchRun(**json.load(sys.stdin))).print()

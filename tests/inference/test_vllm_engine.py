"""Real vLLM with a real model: SmolLM2-135M in float32, against transformers with the same weights.

`make test-vllm` runs this. vLLM has an interpreter of its own (`VLLM_PYTHON`); the replicas are Ray actors in it, and
this process trains, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import yaml

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cadenza import DataProto, ResourceManager, RolloutScheduler  # noqa: E402
from cadenza.cluster.remote_replica import RemoteReplica  # noqa: E402
from cadenza.inference.codec import load_codec  # noqa: E402
from cadenza.inference.http_engine import HttpReplica  # noqa: E402
from cadenza.inference.replica import (  # noqa: E402
    Finish,
    Generation,
    NotSupported,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    Request,
    RequestRefused,
    Sampling,
    Span,
    StaleEpoch,
)
from cadenza.inference.server import Server, ServerConfig  # noqa: E402
from cadenza.model_store import fetch  # noqa: E402
from cadenza.observe.run import read_lines  # noqa: E402
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig  # noqa: E402
from cadenza.run.engines import EngineConfig  # noqa: E402
from cadenza.run.engines.vllm import vllm_cluster  # noqa: E402
from cadenza.testing import LocalCluster  # noqa: E402
from cadenza.training import Actor, ActorConfig  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-4
"""Between the logprobs of vLLM and those of a full forward of transformers, both in float32."""
OPTIONS = {
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 28,
}
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.9)
LORA = (8, 16.0)


@pytest.fixture(scope="module")
def path() -> Path:
    """The model, fetched once."""
    return fetch("smollm2-135m", ROOT / "models" / "smollm2")


@pytest.fixture(scope="module")
def python() -> str:
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON does not name an interpreter with vLLM: make test-vllm sets one up")
    return os.environ["VLLM_PYTHON"]


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """All tests share a loop, as the replicas do."""
    with asyncio.Runner() as runner:

        def within(work: Coroutine[Any, Any, T]) -> T:
            return runner.run(asyncio.wait_for(work, 600))

        yield within


@pytest.fixture(scope="module")
def replicas(path: Path, python: str, run: Any) -> Iterator[list[RemoteReplica]]:
    """Two of them, each in its own processes."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
    resources = ResourceManager.on_ray()
    places = resources.place({"one": "0", "two": "1"})
    engine = EngineConfig(kind="vllm", python=python, max_running=16, options=OPTIONS, environment=ENVIRONMENT)
    init: dict[str, Any] = {"model": str(path), "eos_token_ids": frozenset({2}), "dtype": "float32"}
    clusters = [vllm_cluster(places["one"], engine, **init), vllm_cluster(places["two"], engine, **init, lora=LORA)]

    async def start() -> list[RemoteReplica]:
        await asyncio.gather(*(cluster.start() for cluster in clusters))
        return [await RemoteReplica.of_single_worker(cluster) for cluster in clusters]

    async def stop() -> None:
        await asyncio.gather(*(cluster.shutdown() for cluster in clusters))
        await resources.shutdown()

    try:
        yield run(start())
    finally:
        run(stop())
        ray.shutdown()


def text(path: Path, words: str) -> list[int]:
    return [int(token) for token in load_codec(path).encode(words, first=True)]


_ids = iter(range(1, 1 << 30))
_asked: list[int] = []
"""The ids of all requests, in order."""


def ask(tokens: list[int], count: int = 24, sampling: Sampling = GREEDY, **fields: Any) -> Request:
    id = next(_ids)
    _asked.append(id)
    values = {"seed": 11, "offset": 0, "session": id, "group": id, "epoch": 1 << 20}
    half = len(tokens) // 2
    chunks = (np.array(tokens[:half], np.int32), np.array(tokens[half:], np.int32))
    return Request(id, chunks, len(tokens), count, sampling, **(values | fields))


def greedy(model: Any, tokens: list[int], count: int = 24) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([tokens])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(tokens) :
        ].tolist()
    return found


def logprobs(model: Any, tokens: list[int], answer: Generation, sampling: Sampling = GREEDY) -> Any:
    """What a full forward says of the tokens, under the distribution that they were drawn from."""
    with torch.inference_mode():
        ids = torch.tensor([[*tokens, *answer.tokens.tolist()]])
        logits = model(ids).logits[0, len(tokens) - 1 : -1].float()
    chances = torch.softmax(logits / (sampling.temperature or 1.0), -1)
    if sampling.top_p < 1 and sampling.temperature:
        ordered, order = chances.sort(descending=True, dim=-1)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        chances = chances.scatter(1, order, torch.where(dropped, 0.0, ordered))
        chances /= chances.sum(-1, keepdim=True)
    return chances.gather(1, ids[0, len(tokens) :, None])[:, 0].log().numpy()


def changed(model: Any, seed: int) -> dict[str, Any]:
    """Other weights in every layer, far enough to write something else. Those that are tied stay tied."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in model.state_dict().items()
    }
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def with_weights(model: Any, weights: dict[str, Any]) -> Any:
    other = transformers.LlamaForCausalLM(model.config).eval()
    other.load_state_dict(weights)
    return other


ENV = """
class Lengths:
    def reset(self, seed):
        return f"Name {2 + seed % 3} colours."
    def step(self, action):
        return "", len(action) % 7 / 7, True, False, {}
"""
"""Answers of one group hardly ever get one reward, so that every step learns something."""


def started(directory: Path, path: Path, *overrides: str, devices: int, **engine: Any) -> tuple[int, str]:
    """Three steps of a run in a process of its own, so that its Ray ends with it."""
    directory.joinpath("lengths.py").write_text(ENV)
    config = {
        "name": "run",
        "out": str(directory),
        "steps": 3,
        "preset": "grpo",
        "model": {"path": str(path)},
        "envs": {
            "slots": 8,
            "max_context": 256,
            "sampling": {"max_tokens": 8},
            "domains": {"d": {"env": "lengths:Lengths"}},
        },
        "rollout": {"batch_size": 8, "group_size": 4, "alpha": 0},
        "actor": {"lr": 1e-4},
        "engine": engine,
        "validation": None,
        "trackers": [],
    }
    directory.joinpath("config.yaml").write_text(yaml.safe_dump(config))
    start = f"import ray; ray.init('local', num_cpus={devices}, include_dashboard=False, object_store_memory=2 << 30); "
    program = f"import sys; from cadenza.cli import main; {start if devices else ''}sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "config.yaml", *overrides],
        cwd=directory, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:]


def trained(directory: Path, path: Path, *overrides: str, devices: int = 1, **engine: Any) -> Path:
    """A run that must come to its end."""
    code, said = started(directory, path, *overrides, devices=devices, **engine)
    assert code == 0, said
    return directory / "run"


def is_on_policy(run: Path) -> None:
    """Each step learns something, and the engine writes under what the trainer has then."""
    steps = [line for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]
    assert len(steps) == 3
    assert all(line["train/grad_norm"] > 0.01 for line in steps)
    gaps = [line["train/logprob_gap_max"] for line in steps]
    print(f"\nlogprobs of three steps: {', '.join(f'{gap:.1e}' for gap in gaps)} apart at most")
    assert max(gaps) < TOLERANCE


@pytest.mark.parametrize(
    ("inference", "lora"), [("0", True), ("1-2", False)], ids=["adapter-one-replica", "whole-two-replicas"]
)
def test_a_run_learns_and_vllm_writes_under_what_it_learned(
    tmp_path: Path, path: Path, python: str, inference: str, lora: bool
) -> None:
    """Before the other tests, which keep their replicas to the end."""
    run = trained(
        tmp_path, path, "backend=ray", f"devices={{actor: '0', inference: '{inference}'}}",
        *(["model.lora={r: 8, alpha: 16}", "actor.lr=2e-3"] if lora else ["envs.workers=2"]),
        devices=3, kind="vllm", python=python, max_running=16, options=OPTIONS, environment=ENVIRONMENT,
    )  # fmt: skip
    is_on_policy(run)


def test_a_run_is_refused_in_which_vllm_would_have_to_sleep_on_a_cpu(tmp_path: Path, path: Path, python: str) -> None:
    overrides = ("backend=ray", "devices={actor: '0', inference: 0-1}")
    code, said = started(tmp_path, path, *overrides, devices=2, kind="vllm", python=python)
    assert code == 1, said
    assert "actor and inference cannot alternate on 0: vLLM cannot sleep on a CPU. Give them devices" in said


def test_tokens_and_logprobs_are_those_of_transformers(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    async def work() -> None:
        prompts = [text(path, words) for words in ("Name three colours.", "What is 2 + 3?", "Tell me about Paris.")]
        answers = await asyncio.gather(*(replica.generate(ask(p)) for p in prompts for replica in replicas))
        for number, answer in enumerate(answers):
            prompt = prompts[number // 2]
            assert answer.tokens.tolist() == greedy(model, prompt)
            np.testing.assert_allclose(answer.logprobs, logprobs(model, prompt, answer), atol=TOLERANCE)
            assert answer.spans == (Span(0, len(answer.tokens)),)
            assert answer.finish is (Finish.STOP if answer.tokens[-1] == 2 else Finish.LENGTH)

    run(work())


def test_a_seed_is_a_sample_and_its_logprobs_are_those_of_the_draw(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    async def work() -> None:
        prompt = text(path, "Write a line of a poem.")
        same = [await replica.generate(ask(prompt, sampling=WARM)) for replica in replicas]
        other = await replicas[0].generate(ask(prompt, sampling=WARM, seed=12))
        assert same[0].tokens.tolist() == same[1].tokens.tolist() != other.tokens.tolist()
        for answer in (same[0], other):
            np.testing.assert_allclose(answer.logprobs, logprobs(model, prompt, answer, WARM), atol=TOLERANCE)

    run(work())


def test_prompts_that_do_not_fit_into_one_step_wait_for_the_next(replicas: list[RemoteReplica], run: Any) -> None:
    """On a CPU, vLLM dies of a prompt in parts whose request has a seed."""

    async def work() -> None:
        prompts = [[5 + number, *range(100, 290)] for number in range(8)]
        answers = await asyncio.gather(*(replicas[0].generate(ask(prompt, 4, WARM)) for prompt in prompts))
        assert all(answer.finish in (Finish.LENGTH, Finish.STOP) for answer in answers)

    run(work())


def test_stop_tokens_end_an_answer_and_belong_to_it(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    async def work() -> None:
        prompt = text(path, "Name three colours.")
        expected = greedy(model, prompt)
        stop = next(token for token in expected[3:] if expected.index(token) >= 3)
        answer = await replicas[0].generate(ask(prompt, sampling=Sampling(temperature=0.0, stop=(stop,))))
        assert (answer.tokens.tolist(), answer.finish) == (expected[: expected.index(stop) + 1], Finish.STOP)

    run(work())


def test_an_aborted_turn_goes_on_elsewhere_as_one_sequence(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    async def work() -> None:
        prompt, count = text(path, "Tell me a long story about a fox."), 60
        request = ask(prompt, count)
        future = replicas[0].generate(request)
        await until_written(replicas[0], 10)
        replicas[0].abort(request.id, "moved")
        part = await future
        assert part.finish is Finish.ABORT
        assert 10 <= len(part.tokens) < count
        so_far = part.tokens.tolist()
        rest = await replicas[1].generate(ask([*prompt, *so_far], count - len(so_far), offset=len(so_far)))
        assert [*so_far, *rest.tokens.tolist()] == greedy(model, prompt, count)

    run(work())


async def until_written(replica: Replica, count: int) -> None:
    """Until the request that was asked for last has so many tokens: the report may still be of those before it."""
    newest = _asked[-1]
    while not any(p.id == newest and p.written >= count for p in replica.requests_in_flight()):  # noqa: ASYNC110 - another process writes
        await asyncio.sleep(0.05)


def test_requests_that_cannot_be_served_are_refused(replicas: list[RemoteReplica], run: Any) -> None:
    async def work() -> None:
        with pytest.raises(RequestRefused, match="1 to 511 tokens"):
            await replicas[0].generate(ask([5] * 512))
        with pytest.raises(RequestRefused, match="are not 4 tokens of 0 to 49151"):
            await replicas[0].generate(ask([5, 6, 7, 49152]))

    run(work())


def test_sleep_is_refused_where_vllm_would_only_pretend(replicas: list[RemoteReplica], run: Any) -> None:
    with pytest.raises(NotSupported, match="no sleep mode on 'cpu', where it would say that it sleeps"):
        run(replicas[0].sleep())


def test_pauses_end_freeze_or_drain(replicas: list[RemoteReplica], run: Any, path: Path, model: Any) -> None:
    async def work() -> None:
        replica, prompt, count = replicas[0], text(path, "Tell me a long story about a fox."), 40
        drained = [replica.generate(ask(prompt, 40)) for _ in range(3)]
        await until_written(replica, 1)
        await replica.pause(1, PauseMode.DRAIN)
        assert [(await future).finish for future in drained] == [Finish.LENGTH] * 3  # they come on a channel
        with pytest.raises(StaleEpoch):
            await replica.generate(ask(prompt, epoch=0))
        await replica.resume()
        kept = replica.generate(ask(prompt, count))
        await until_written(replica, 4)
        await replica.pause(2, PauseMode.KEEP)
        before = (await replica.stats()).generated
        await asyncio.sleep(1.0)
        stats = await replica.stats()
        assert (stats.generated, stats.paused) == (before, True)
        await replica.resume()
        assert (await kept).tokens.tolist() == greedy(model, prompt, count)
        running = [replica.generate(ask(prompt, count)) for _ in range(3)]
        await until_written(replica, 1)
        await replica.pause(3, PauseMode.ABORT)
        assert {(await future).finish for future in running} == {Finish.ABORT}
        await replica.resume()

    run(work())


def test_new_weights_write_what_transformers_writes_with_them(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    weights = changed(model, seed=1)
    other = with_weights(model, weights)

    async def work() -> None:
        prompt, replica = text(path, "Name three colours."), replicas[0]
        assert greedy(other, prompt) != greedy(model, prompt), "the test needs weights that differ"
        story = text(path, "Tell me a long story about a fox.")
        running = replica.generate(ask(story, 100))
        await until_written(replica, 4)
        await replica.load_weights(1, weights)  # what runs is frozen meanwhile
        answer = await replica.generate(ask(prompt))
        assert (answer.tokens.tolist(), answer.spans) == (greedy(other, prompt), (Span(1, len(answer.tokens)),))
        np.testing.assert_allclose(answer.logprobs, logprobs(other, prompt, answer), atol=TOLERANCE)
        mixed = await running
        assert [span.version for span in mixed.spans] == [0, 1]
        first = mixed.spans[0].length
        tail = Generation(mixed.tokens[first:], mixed.logprobs[first:], mixed.spans[1:], mixed.finish)
        head = [*story, *mixed.tokens[:first].tolist()]
        np.testing.assert_allclose(tail.logprobs, logprobs(other, head, tail), atol=TOLERANCE)
        with pytest.raises(ReplicaError, match="all weights must come together"):
            await replica.load_weights(2, {"model.norm.weight": weights["model.norm.weight"]})
        await replica.resume()
        await replica.load_weights(2, None)
        answer = await replica.generate(ask(prompt))
        assert (answer.tokens.tolist(), answer.spans) == (greedy(model, prompt), (Span(2, len(answer.tokens)),))

    run(work())


def test_an_adapter_writes_what_peft_writes_with_it(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=LORA[0], lora_alpha=LORA[1], target_modules="all-linear", task_type="CAUSAL_LM")
    base = with_weights(model, model.state_dict())
    torch.manual_seed(3)  # peft draws too
    adapted = peft.get_peft_model(base, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn_like(parameter)

    async def work() -> None:
        prompt = text(path, "Name three colours.")
        assert greedy(adapted, prompt) != greedy(model, prompt), "the test needs an adapter that matters"
        await replicas[1].load_weights(1, peft.get_peft_model_state_dict(adapted))
        answer = await replicas[1].generate(ask(prompt))
        assert (answer.tokens.tolist(), answer.spans) == (greedy(adapted, prompt), (Span(1, len(answer.tokens)),))
        np.testing.assert_allclose(answer.logprobs, logprobs(adapted, prompt, answer), atol=TOLERANCE)
        for parameter in (p for name, p in adapted.named_parameters() if "lora_B" in name):
            parameter.data.zero_()
        await replicas[1].load_weights(2, peft.get_peft_model_state_dict(adapted))
        assert (await replicas[1].generate(ask(prompt))).tokens.tolist() == greedy(model, prompt)
        with pytest.raises(ReplicaError, match="make the replica with 'lora'"):
            await replicas[0].load_weights(3, peft.get_peft_model_state_dict(adapted))
        await replicas[0].resume()

    run(work())


class Colours:
    """An env of one question."""

    def reset(self, seed: int) -> str:
        return f"Name {2 + seed % 3} colours."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float("red" in action.lower()), True, False, {}


def test_rollouts_of_both_replicas_are_what_the_trainer_computes(
    replicas: list[RemoteReplica], run: Any, path: Path, model: Any
) -> None:
    """Through the scheduler and the sampler, with an update in between, to the batch that is trained."""

    async def work() -> None:
        before = [(await replica.stats()).generated for replica in replicas]
        cluster = LocalCluster(replicas, load_codec(path))
        cluster.sampler.epoch = 100  # the replicas have seen some
        scheduler = RolloutScheduler(
            RolloutConfig(batch_size=16, group_size=4, alpha=0.0),
            EnvManagerConfig(
                domains={"colours": DomainConfig(env=Colours)},
                slots=16,
                max_context=256,
                sampling=Sampling(max_tokens=24),
            ),
            cluster.resources,
            cluster,
        )
        try:
            await scheduler.suspend()
            await cluster.sampler.load_weights(3, model.state_dict())
            await scheduler.resume()
            batch = await scheduler.get_batch(DataProto(meta_info={"global_step": 0}), 16)
        finally:
            await scheduler.shutdown()
        assert batch is not None
        after = [(await replica.stats()).generated for replica in replicas]
        assert all(now > then for now, then in zip(after, before, strict=True)), "both replicas took part"
        actor = Actor(with_weights(model, model.state_dict()), ActorConfig(), seed=0)
        mask = batch.batch.numpy("response_mask").astype(bool)
        said, computed = batch.batch.numpy("infer_logprobs"), actor.logprobs(batch).batch.numpy("old_logprobs")
        difference = np.abs(said[mask] - computed[mask])
        apart = f"{difference.max():.1e} apart at most, {difference.mean():.1e} on average"
        print(f"\nlogprobs of {mask.sum()} tokens: {apart}")
        assert difference.max() < TOLERANCE
        assert set(batch.batch.numpy("versions")[mask].tolist()) == {3}

    run(work())


def test_a_server_is_a_replica_over_http_and_takes_weights(
    run: Any, python: str, path: Path, model: Any, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--served-model-name", "smollm2",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--kv-cache-memory-bytes", str(1 << 28), "--no-enable-chunked-prefill",
        "--weight-transfer-config", '{"backend": "cadenza"}',
    ]  # fmt: skip
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
        )
    weights = changed(model, seed=2)
    other = with_weights(model, weights)

    async def work() -> None:
        config = ServerConfig(url=f"http://127.0.0.1:{port}")
        await up(config, server)
        replica = HttpReplica(Server(config), eos_token_ids={2}, kv_tokens=512)
        await replica.check()
        prompt = text(path, "Name three colours.")
        answer = await replica.generate(ask(prompt))
        assert answer.tokens.tolist() == greedy(model, prompt)
        np.testing.assert_allclose(answer.logprobs, logprobs(model, prompt, answer), atol=TOLERANCE)
        request = ask(prompt, 60)
        future = replica.generate(request)
        await until_written(replica, 5)
        replica.abort(request.id, "moved")
        part = (await future).tokens.tolist()
        rest = await replica.generate(ask([*prompt, *part], 24 - len(part), offset=len(part)))
        assert [*part, *rest.tokens.tolist()] == greedy(model, prompt)
        judge = Server(config)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in await judge.chat(question, Sampling(max_tokens=32, temperature=0.0))
        await judge.close()
        await replica.pause(1, PauseMode.ABORT)
        await replica.load_weights(1, weights)
        await replica.resume()
        answer = await replica.generate(ask(prompt))
        assert (answer.tokens.tolist(), answer.spans) == (greedy(other, prompt), (Span(1, len(answer.tokens)),))
        await replica.pause(2, PauseMode.ABORT)
        await replica.load_weights(2, path)
        await replica.resume()
        assert (await replica.generate(ask(prompt))).tokens.tolist() == greedy(model, prompt)
        run = await asyncio.to_thread(trained, tmp_path, path, devices=0, kind="http", servers=[{"url": config.url}])
        is_on_policy(run)
        server.terminate()
        server.wait(60)
        with pytest.raises(ReplicaLost):
            await replica.generate(ask(prompt))
        await replica.close()

    try:
        run(work())
    except BaseException:
        print(log.read_text()[-5000:])
        raise
    finally:
        server.terminate()
        server.wait(60)


async def up(config: ServerConfig, process: subprocess.Popen[bytes]) -> None:
    """The server answers."""
    while True:
        assert process.poll() is None, "the server ended"
        server = Server(config.model_copy(update={"tries": 1}))
        try:
            await server.request_json("GET", "/v1/models")
        except ReplicaError:
            await asyncio.sleep(1.0)
        else:
            return
        finally:
            await server.close()


def test_a_replica_whose_processes_die_is_lost(replicas: list[RemoteReplica], run: Any, path: Path) -> None:
    """The last test: it ends them."""

    async def work() -> None:
        future = replicas[1].generate(ask(text(path, "Tell me a long story."), 200))
        await until_written(replicas[1], 1)
        end_engines(2)
        with pytest.raises(ReplicaLost, match="vllm-0: the processes of vLLM are gone"):
            await future

    run(work())


def end_engines(count: int) -> None:
    """Kill the engine processes of all replicas of this process."""
    mine = descendants(os.getpid())
    engines = [pid for pid in mine if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(engines) == count
    for pid in engines:
        os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = entry.read_text().partition(" ")
            children.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(pid))
        except OSError:
            continue  # it has ended
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found

"""The demo's job is only a fair witness if it computes the same bits twice, and if its state is all that it needs to go on."""

from __future__ import annotations

import copy
from pathlib import Path

import msgpack
import pytest
import torch

from adacheck.digest import digest
from adacheck.states import tensor_bytes
from adacheck.tools.byte_gpt import BENCH, DEMO, ByteGPT, GPTConfig
from adacheck.tools.corpus import ShuffledWindows, read_corpus, source_files
from adacheck.tools.training import BENCH_JOB, JobConfig, Precision, TrainingJob, learning_rate_factor

SMALL = GPTConfig(context=32, width=32, layers=2, heads=4)


def small_job(precision: Precision = "autocast", seed: int = 1) -> TrainingJob:
    return TrainingJob(JobConfig(SMALL, batch=4, precision=precision, seed=seed, warmup_steps=3, total_steps=20, corpus_bytes=1_000))


def parameter_digests(job: TrainingJob) -> dict[str, bytes]:
    return {name: digest(tensor_bytes(tensor)) for name, tensor in job.model.state_dict().items()}


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_two_runs_from_one_seed_are_equal_bit_for_bit(precision: Precision) -> None:
    first, second = small_job(precision), small_job(precision)
    assert parameter_digests(first) == parameter_digests(second)
    torch.manual_seed(7)
    losses = [first.train_one_step() for _ in range(6)]
    torch.manual_seed(7)
    assert [second.train_one_step() for _ in range(6)] == losses
    assert parameter_digests(first) == parameter_digests(second)


def test_another_seed_gives_another_run() -> None:
    assert parameter_digests(small_job(seed=1)) != parameter_digests(small_job(seed=2))


def test_dropout_takes_part() -> None:
    first, second = small_job(), small_job()
    torch.manual_seed(7)
    losses = [first.train_one_step() for _ in range(2)]
    torch.manual_seed(8)
    assert [second.train_one_step() for _ in range(2)] != losses


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_a_fresh_job_with_loaded_state_goes_on_bit_for_bit(precision: Precision) -> None:
    job = small_job(precision)
    for _ in range(9):  # 7 batches an epoch: the loader is in its second one
        job.train_one_step()
    weights, rng = copy.deepcopy(job.model.state_dict()), torch.get_rng_state()
    moments = copy.deepcopy(job.optimizer.state_dict())
    extra = msgpack.packb({name: item.state_dict() for name, item in job.extra.items()})
    losses = [job.train_one_step() for _ in range(6)]

    resumed = small_job(precision, seed=3)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(moments)
    for name, state in msgpack.unpackb(extra).items():
        resumed.extra[name].load_state_dict(state)
    torch.set_rng_state(rng)
    assert [resumed.train_one_step() for _ in range(6)] == losses
    assert parameter_digests(resumed) == parameter_digests(job)


def test_the_job_learns() -> None:
    job = small_job()
    losses = [job.train_one_step() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize(("clip_norm", "bf16_values"), [(1e9, True), (0.1, False)])
def test_gradients_of_matrices_under_autocast_are_bf16_values_until_they_are_clipped(clip_norm: float, bf16_values: bool) -> None:
    job = TrainingJob(JobConfig(SMALL, batch=4, clip_norm=clip_norm, corpus_bytes=1_000))
    job.train_one_step()
    gradient = job.model.blocks[0].get_submodule("qkv").get_parameter("weight").grad
    assert gradient is not None
    assert bool((gradient.view(torch.int32) & 0xFFFF == 0).all()) == bf16_values


def test_every_window_comes_once_an_epoch_in_a_new_order() -> None:
    corpus = torch.arange(60, dtype=torch.uint8)
    loader = ShuffledWindows(corpus, batch=2, context=9, seed=5)
    epochs = [[loader.next_batch() for _ in range(3)] for _ in range(2)]
    for epoch in epochs:
        assert torch.equal(torch.cat(epoch).flatten().sort().values, corpus.long())
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_a_loader_refuses_the_state_of_another_corpus() -> None:
    corpus = torch.zeros(100, dtype=torch.uint8)
    state = ShuffledWindows(corpus, batch=2, context=9, seed=5).state_dict()
    with pytest.raises(ValueError, match="windows was 10 and is 5 now"):
        ShuffledWindows(corpus[:50], batch=2, context=9, seed=5).load_state_dict(state)
    with pytest.raises(ValueError, match="too few for one batch of 11"):
        ShuffledWindows(corpus, batch=11, context=9, seed=5)


def test_the_corpus_is_ordered_by_name_and_leaves_out_what_is_installed(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "site-packages/x.py", "test/t.py", "a/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == ["a/z.py", "b.py"]
    assert bytes(read_corpus(100_000).tolist()) == bytes(read_corpus(200_000)[:100_000].tolist())


def test_sizes_are_those_the_issue_of_the_benchmark_names() -> None:
    with torch.device("meta"):
        demo, bench = (sum(p.numel() for p in ByteGPT(config).parameters()) for config in (DEMO, BENCH))
    assert 3_000_000 < demo < 4_000_000
    assert 50_000_000 < bench < 60_000_000
    assert BENCH_JOB.batch * BENCH_JOB.model.context == 4_096


def test_the_head_is_tied_to_the_embedding_only_if_asked() -> None:
    tied, untied = ByteGPT(SMALL), ByteGPT(GPTConfig(context=32, width=32, layers=1, heads=4, tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_the_schedule_warms_up_and_comes_down() -> None:
    config = JobConfig(SMALL, batch=4, warmup_steps=4, total_steps=20)
    assert [learning_rate_factor(step, config) for step in (0, 3, 4, 12, 20, 99)] == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1, 0.1])

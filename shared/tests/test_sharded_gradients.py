"""Sharding changes where numbers lie, not what they are."""

from dataclasses import dataclass

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from toy import LENGTH, VOCABULARY, Toy, loss_of, make_toy

from flywheel_shared.errors import UserError
from flywheel_shared.fsdp import clip_grad_norm, shard_model
from flywheel_shared.launch import World, distributed
from flywheel_shared.mesh import ParallelDims
from flywheel_shared.optimizer import make_adamw

SAMPLES = 8  # of the global batch
MAX_NORM = 0.05  # below the norm there is, so that clipping takes part
# float32 sums in another order: errors of a few 1e-7 of the largest entry were seen.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    ranks: int
    replicate: int = 1
    context: int = 1
    accumulation: int = 1
    activation_checkpointing: str = "none"
    reshard: bool = True

    def __str__(self) -> str:
        return (
            f"{self.ranks}ranks-replicate{self.replicate}-context{self.context}-accumulate{self.accumulation}-"
            f"{self.activation_checkpointing}{'' if self.reshard else '-kept'}"
        )


CASES = [
    Case(1),
    Case(2),
    Case(2, replicate=2),
    Case(2, accumulation=2),
    Case(2, activation_checkpointing="full"),
    Case(2, activation_checkpointing="selective", reshard=False),
    Case(4),
    Case(4, replicate=2),
    Case(4, replicate=2, accumulation=2, activation_checkpointing="full"),
    Case(4, replicate=4),
    Case(4, context=2),
    Case(4, replicate=2, context=2, accumulation=2),
]


def global_batch() -> Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return make_adamw(
        model.named_parameters(), learning_rate=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, object]:
    """One process, no FSDP, PyTorch's own clipping: loss, norm, gradients, clipped ones, stepped weights."""
    model = make_toy()
    loss = loss_of(model, global_batch())["loss"]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    clipped = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer_of(model).step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "loss": loss.item(),
        "norm": norm.item(),
        "gradients": gradients,
        "clipped": clipped,
        "weights": weights,
    }


def sharded(world: World, cases: list[Case]) -> dict[str, dict[str, object]]:
    return {str(case): one_case(world, case) for case in cases}


def one_case(world: World, case: Case) -> dict[str, object]:
    mesh = ParallelDims(replicate=case.replicate, context=case.context).build(world)
    toy: Toy = make_toy()
    model = shard_model(
        toy,
        mesh,
        list(toy.blocks),
        precision="fp32",
        activation_checkpointing=case.activation_checkpointing,
        reshard_after_forward=case.reshard,
    )
    micro_batches = global_batch().chunk(mesh.data_degree)[mesh.data_rank].chunk(case.accumulation)
    loss = 0.0
    for i, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(i == case.accumulation - 1)
        part = loss_of(model, batch)["loss"] / case.accumulation
        part.backward()
        loss = loss + part.detach()
    gradients = full({name: p.grad for name, p in toy.named_parameters()})
    norm, (total, ones) = clip_grad_norm(
        toy.parameters(), MAX_NORM, mesh, torch.stack([loss, torch.ones(())])
    )
    clipped = full({name: p.grad for name, p in toy.named_parameters()})
    optimizer_of(toy).step()
    return {
        "loss": total / world.world_size,
        "ones": ones,
        "norm": norm,
        "gradients": gradients,
        "clipped": clipped,
        "weights": full(dict(toy.named_parameters())),
    }


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().full_tensor().clone() for name, x in tensors.items()}


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory) -> dict[str, list[dict[str, object]]]:
    """By case, what each rank found."""
    found: dict[str, list[dict[str, object]]] = {}
    for count in (1, 2, 4):
        cases = [case for case in CASES if case.ranks == count]
        by_rank = run_ranks(count, sharded, cases, scratch=tmp_path_factory.mktemp(f"{count}_ranks"))
        found |= {str(case): [one[str(case)] for one in by_rank] for case in cases}
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_single_process(alone, everywhere, case):
    """Loss, norm, and every parameter's gradient, before and after clipping, and weights after a step."""
    for found in everywhere[str(case)]:
        assert found["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
        assert found["norm"] == pytest.approx(alone["norm"], rel=TOLERANCE)
        assert found["ones"] == case.ranks
        for kind in ("gradients", "clipped", "weights"):
            assert found[kind].keys() == alone[kind].keys()
            for name, expected in alone[kind].items():
                error = (found[kind][name] - expected).abs().max() / expected.abs().max()
                assert error <= TOLERANCE, f"{kind} of {name}: {error:.2e}"


@pytest.mark.distributed
def test_all_ranks_get_the_same_norm_to_the_bit(everywhere):
    for found in everywhere.values():
        assert len({(one["norm"], one["loss"]) for one in found}) == 1


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (ParallelDims(replicate=2), "replicate 2 x shard what is left x context 1 does not make 1 ranks"),
        (ParallelDims(shard=3), "replicate 1 x shard 3 x context 1 does not make 1 ranks"),
        (ParallelDims(shard=0), "parallel.shard is 0"),
        (ParallelDims(context=-1), "parallel.context is -1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_a_users_mistake(dims, said):
    with distributed("cpu") as world, pytest.raises(UserError, match=said):
        dims.build(world)


def test_blocks_compute_in_bfloat16_on_float32_parameters():
    """And gradients arrive in float32, within bfloat16's 3 digits of the float32 ones."""
    reference = make_toy()
    loss_of(reference, global_batch())["loss"].backward()
    seen = []
    with distributed("cpu") as world:
        mesh = ParallelDims().build(world)
        toy = make_toy()
        toy.blocks[0].up.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
        model = shard_model(toy, mesh, list(toy.blocks), precision="bf16")
        loss_of(model, global_batch())["loss"].backward()
        assert seen == [torch.bfloat16]
        for name, parameter in toy.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            expected = dict(reference.named_parameters())[name].grad
            error = (parameter.grad.full_tensor() - expected).norm() / expected.norm()
            assert error < 0.03, f"{name}: {error:.3f}"


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradients(alone):
    """Compilation fuses and reorders: 1e-5 of the largest entry."""
    with distributed("cpu") as world:
        mesh = ParallelDims().build(world)
        toy = make_toy()
        model = shard_model(
            toy, mesh, list(toy.blocks), precision="fp32", compile=True, activation_checkpointing="full"
        )
        loss_of(model, global_batch())["loss"].backward()
        for name, parameter in toy.named_parameters():
            expected = alone["gradients"][name]
            error = (parameter.grad.full_tensor() - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{name}: {error:.2e}"


def test_names_of_parameters_survive_sharding_and_checkpointing():
    with distributed("cpu") as world:
        mesh = ParallelDims().build(world)
        toy = make_toy()
        shard_model(toy, mesh, list(toy.blocks), activation_checkpointing="selective")
        assert list(toy.state_dict()) == list(make_toy().state_dict())

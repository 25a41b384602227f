"""The state before a step of somebody else's loop: whatever the step changes, it is as it was."""

import torch
from torch import nn

from can_train.adapters.step_state import StepState


class Helper:
    def __init__(self) -> None:
        self.count = 0


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.history: list[float] = [1.0]
        self.seen: dict[str, list[int]] = {"rows": [1]}
        self.words = {f"word {number}": number for number in range(5000)}
        self.outputs = list(range(5000))
        self.helper = Helper()
        self.mean = torch.zeros(3)
        self.register_buffer("least", torch.zeros(0))


def change(network: Network) -> None:
    network.history.append(2.0)
    network.seen["rows"].append(2)
    network.seen["columns"] = [3]
    network.words["a new word"] = 1
    network.outputs += [1, 2, 3]
    network.helper.count += 1
    network.mean.add_(1)
    network.get_buffer("least").resize_(4).fill_(1)
    network.layer.weight.requires_grad_(False)
    network.layer.register_forward_hook(lambda *_: None)
    network.norm(torch.randn(4, 3))
    network.new = 1
    torch.rand(1)


def test_a_step_that_is_undone_leaves_no_trace() -> None:
    network = Network()
    state = StepState(network, torch.device("cpu"))
    history, seen, generator = network.history, network.seen, torch.get_rng_state()
    for _ in range(3):
        state.read()
        change(network)
        assert state.restore() == ""
        assert network.history is history == [1.0]
        assert network.seen is seen == {"rows": [1]}
        assert (len(network.words), len(network.outputs)) == (5000, 5000)
        assert network.helper.count == 0
        assert torch.equal(network.mean, torch.zeros(3))
        assert network.get_buffer("least").shape == (0,)
        assert network.layer.weight.requires_grad
        assert not network.layer._forward_hooks
        assert torch.equal(network.norm.running_mean, torch.zeros(3))  # type: ignore[arg-type]
        assert int(network.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
        assert not hasattr(network, "new")
        assert torch.equal(torch.get_rng_state(), generator)


def test_a_buffer_that_a_step_has_resized_is_read_again() -> None:
    network = Network()
    state, least = StepState(network, torch.device("cpu")), network.get_buffer("least")
    for size in (2, 5, 1):
        state.read()
        kept = least.tolist()
        least.resize_(size).fill_(size)
        state.restore_attributes()
        assert least.tolist() == kept
        least.resize_(size).fill_(size)


def test_changed_weights_and_gradients_are_told() -> None:
    network = Network()
    state = StepState(network, torch.device("cpu"))
    network.layer.weight.grad = torch.zeros(3, 3)
    state.read()
    network.layer.weight.grad.add_(1)
    assert state.restore() == "it has added to gradients of earlier batches"
    state.read()
    with torch.no_grad():
        network.layer.weight.add_(1)
    assert state.restore() == "it has changed the parameters"


def test_gradients_aside_are_added_as_autograd_adds() -> None:
    network, x = Network(), torch.randn(4, 3)
    state = StepState(network, torch.device("cpu"))
    gradients = []
    for is_aside in (False, True):
        network.zero_grad()
        network.layer(x).sum().backward()
        state.read()
        loss = network.layer(2 * x).square().sum()
        if is_aside:
            with state.gradients_aside():
                loss.backward()
        else:
            loss.backward()
        gradients.append([parameter.grad for parameter in network.layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_parameters_and_the_state_of_optimizers_are_put_back_from_their_copies() -> None:
    network = Network()
    state, weight = StepState(network, torch.device("cpu")), network.layer.weight
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    for _ in range(2):
        network.layer(torch.ones(2, 3)).sum().backward()
        state.read()
        state.copy_parameters([optimizer])
        kept, entries = (
            weight.detach().clone(),
            {name: value.clone() for name, value in optimizer.state[weight].items()},
        )
        assert not state.parameters_changed()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        assert state.parameters_changed()
        assert state.restore() == ""
        assert torch.equal(weight, kept)
        assert {name: value.tolist() for name, value in optimizer.state[weight].items()} == {
            name: value.tolist() for name, value in entries.items()
        }
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step()


def test_changes_that_pytorch_does_not_count_are_seen_with_copies() -> None:
    network = Network()
    state, weight = StepState(network, torch.device("cpu")), network.layer.weight
    state.read()
    weight.data.mul_(2)
    assert not state.parameters_changed()
    state.read()
    state.copy_parameters()
    kept = weight.detach().clone()
    weight.data.mul_(2)
    assert state.parameters_changed()
    state.restore()
    weight.data = weight.data * 2
    assert state.parameters_changed()
    state.restore()
    assert torch.equal(weight, kept)


def test_parameters_that_are_no_numbers_have_not_changed() -> None:
    network = Network()
    state = StepState(network, torch.device("cpu"))
    network.layer.weight.data[0, 0] = torch.nan
    state.read()
    state.copy_parameters()
    assert not state.parameters_changed()

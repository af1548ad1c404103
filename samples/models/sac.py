"""Soft actor-critic, a method of reinforcement learning: a random policy, and two critics that estimate its value."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

OBSERVED, ACTIONS = 376, 17
"""Sizes of a humanoid's state and action."""
WIDTH = 256
DISCOUNT, PACE = 0.99, 0.005
LEARNING_RATE = 3e-4


class SAC(nn.Module):
    """A policy, which chooses actions; two critics, which estimate their value; and copies of the critics that follow
    slowly.

    Parameters
    ----------
    observed : length of a state
    actions : length of an action
    width : number of hidden units of a layer

    Source: Haarnoja et al. 2018 (Soft actor-critic algorithms and applications), sections 4 and 5, appendix C.
    """

    def __init__(self, observed: int = OBSERVED, actions: int = ACTIONS, width: int = WIDTH) -> None:
        super().__init__()
        self.actions = actions
        self.policy = _perceptron(observed, width, 2 * actions)
        self.critics = nn.ModuleList(_perceptron(observed + actions, width, 1) for _ in range(2))
        self.followers = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(
        self,
        state: Tensor,
        action: Tensor | None = None,
        reward: Tensor | None = None,
        following: Tensor | None = None,
        ended: Tensor | None = None,
    ) -> Any:
        """Return actions (B, actions) between -1 and 1, or the losses of critics, policy and temperature by name.

        The losses are returned if a transition, that is all parameters, is given.

        Parameters
        ----------
        state, following : (B, observed) float, states before and after the action
        action : (B, actions) float
        reward : (B,) float, reward of the action
        ended : (B,) bool, True if the episode ended with the action
        """
        if action is None or reward is None or following is None or ended is None:
            return self.act(state)[0]
        self._follow()
        with torch.no_grad():
            then, chance = self.act(following)
            expected = self._worth(self.followers, following, then).amin(dim=0) - self.log_temperature.exp() * chance
            expected = reward + DISCOUNT * torch.logical_not(ended) * expected
        judged = self._worth(self.critics, state, action)
        mine, chance = self.act(state)
        surprise = (chance + self.actions).detach()
        return {
            "critics": functional.huber_loss(judged, expected.expand_as(judged), reduction="sum") / len(state),
            "policy": (self.log_temperature.exp().detach() * chance - self._frozen_worth(state, mine)).mean(),
            "temperature": -(self.log_temperature * surprise).mean(),
        }

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return random actions of the policy, (B, actions) float, and the logarithms of their probability densities,
        (B,) float.

        state : (B, observed) float
        """
        middle, spread = self.policy(state).chunk(2, dim=-1)
        spread = functional.softplus(spread) + 1e-3
        drawn = middle + spread * torch.randn_like(middle)
        density = -(((drawn - middle) / spread).square() / 2 + spread.log() + math.log(2 * math.pi) / 2)
        # change of the density by the tanh
        squeezed = 2 * (math.log(2) - drawn - functional.softplus(-2 * drawn))
        return drawn.tanh(), (density - squeezed).sum(dim=-1)

    def _worth(self, critics: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        """Return the value of each action in its state by each of two critics, (2, B) float."""
        both = torch.cat([state, action], dim=-1)
        return torch.stack([critic(both).squeeze(-1) for critic in critics])

    def _frozen_worth(self, state: Tensor, action: Tensor) -> Tensor:
        """Return the lower of both critics' values of each action in its state, (B,) float; it has no gradient for the
        critics' weights.
        """
        both = torch.cat([state, action], dim=-1)
        said = []
        for critic in self.critics:
            frozen = {name: value.detach() for name, value in critic.named_parameters()}
            said.append(functional_call(critic, frozen, (both,)).squeeze(-1))
        return torch.minimum(*said)

    def _follow(self) -> None:
        """Move the weights of the copies of the critics a small step, `PACE` of the difference, towards those of the
        critics.
        """
        torch._foreach_lerp_(
            list(self.followers.parameters()), [item.detach() for item in self.critics.parameters()], PACE
        )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return optimizers of the critics, the policy and the temperature.

        They update weights with operators on lists of tensors, as is usual on accelerators.
        """
        parts = (self.critics.parameters(), self.policy.parameters(), [self.log_temperature])
        return [torch.optim.Adam(part, lr=LEARNING_RATE, foreach=True) for part in parts]


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Mish()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.Mish(), nn.Linear(width, outputs)),
    )


def sac(batch_size: int = 256, run: str = "predict") -> tuple[SAC, dict[str, Any]]:
    """Return the policy and critics with random weights, and arguments for them by name.

    Parameters
    ----------
    batch_size : number of states
    run : `predict`, `loss` or `train`; the latter two also need actions, rewards and following states
    """
    inputs: dict[str, Any] = {"state": torch.randn(batch_size, OBSERVED)}
    if run != "predict":
        inputs["action"] = torch.rand(batch_size, ACTIONS) * 2 - 1
        inputs["reward"] = torch.randn(batch_size)
        inputs["following"] = torch.randn(batch_size, OBSERVED)
        inputs["ended"] = torch.rand(batch_size) < 0.01
    return SAC(), inputs

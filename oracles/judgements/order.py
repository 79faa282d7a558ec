"""order: nothing depends on the order in which CTAs and threads take their turns."""

from __future__ import annotations

from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Plan
from pagefuzz.oracles.observation import LaunchOrder, OrderKind, RelatedPlan
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.relation import choose
from pagefuzz.oracles.relaunch import RelaunchJudgement

#: Shuffled orders of a case, beside the reversed and the warp-interleaved one.
SHUFFLES = 3


class OrderJudgement(RelaunchJudgement):
    name = "order"
    summary = "no output changes when CTAs and threads take their turns in another order"
    when = "in another order"

    def concerns(self, operation: Operation, flags: frozenset[str]) -> bool:
        # A GPU lets nobody choose; Triton's interpreter has one order.
        return super().concerns(operation, flags) and not flags & {"cuda", "triton"}

    def launches(self, plan: Plan, expectation: Expectation) -> tuple[RelatedPlan, ...]:
        orders = [LaunchOrder(OrderKind.REVERSE), LaunchOrder(OrderKind.WARP_INTERLEAVED)]
        orders += [
            LaunchOrder(OrderKind.SHUFFLED, choose(plan, self.name, f"shuffle {nth}", 2**32))
            for nth in range(SHUFFLES)
        ]
        return tuple(
            RelatedPlan(plan, expectation, order_text(order), order=order) for order in orders
        )


def order_text(order: LaunchOrder) -> str:
    """ "CTAs and threads in reverse order"."""
    match order.kind:
        case OrderKind.SHUFFLED:
            return f"CTAs and threads shuffled by seed {order.seed}"
        case OrderKind.WARP_INTERLEAVED:
            return "lane 0 of every warp first, then lane 1 of every warp, ...; CTAs alike"
        case kind:
            return f"CTAs and threads in {kind.name.lower()} order"

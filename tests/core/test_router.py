"""Routing by affinity and load."""

import pytest

from hpc_rollart.core.router import Router


def make_router() -> Router:
    """Two replicas in each of two pools."""
    return Router(["compute", "bandwidth"], {1: 0, 2: 0, 3: 1, 4: 1})


def test_a_trajectory_goes_to_the_least_loaded_replica_of_the_pool_it_prefers() -> None:
    router = make_router()
    assert [router.route(t, "bandwidth").replica for t in range(4)] == [3, 4, 3, 4]
    router.release(1)
    assert router.route(9, "bandwidth").replica == 4


def test_without_affinity_the_least_loaded_replica_of_all_pools_serves() -> None:
    router = make_router()
    router.route(0, "compute")
    assert [router.route(t, None).replica for t in (1, 2, 3, 4)] == [2, 3, 4, 1]


def test_an_assignment_is_kept_until_it_is_released() -> None:
    router = make_router()
    first = router.route(0, "compute")
    assert router.route(0, "compute") == router.assignment(0) == first
    assert router.load() == {1: 1, 2: 0, 3: 0, 4: 0}
    router.release(0)
    router.release(0)
    assert router.assignment(0) is None and sum(router.load().values()) == 0


def test_a_pool_without_living_replica_falls_back_to_another_and_is_counted() -> None:
    router = make_router()
    for replica in (3, 4):
        router.remove(replica)
    route = router.route(0, "bandwidth")
    assert (route.pool, route.replica, route.fallback) == (0, 1, True)
    assert router.fallbacks == {"bandwidth": 1}
    assert not router.route(1, "compute").fallback


def test_removing_a_replica_returns_what_it_served_to_be_routed_again() -> None:
    router = make_router()
    for trajectory in range(5):
        router.route(trajectory, "compute")
    assert router.remove(1) == [0, 2, 4]
    assert router.assignment(0) is None
    assert {router.route(t, "compute").replica for t in (0, 2, 4)} == {2}
    assert router.remove(1) == []


def test_routing_errors_say_what_is_wrong() -> None:
    router = make_router()
    with pytest.raises(
        ValueError, match=r"affinity 'gpu' names no pool; there are \['bandwidth', 'compute'\]"
    ):
        router.route(0, "gpu")
    for replica in (1, 2, 3, 4):
        router.remove(replica)
    with pytest.raises(RuntimeError, match="no generator replica is alive"):
        router.route(0, "compute")
    with pytest.raises(ValueError, match="there is no pool 5"):
        Router(["compute"], {1: 5})

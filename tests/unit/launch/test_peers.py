"""Where an agent stands, and the files by which nodes of an attempt find each other."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from launch import peers
from launch.peers import Board, PeersMissingError, Place

SLURM = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "2", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "1"}


def place(node: int, num_nodes: int = 2, attempt: int = 0) -> Place:
    return Place(job="7", attempt=attempt, node=node, num_nodes=num_nodes, is_slurm=False)


def test_slurm_says_where_an_agent_is_even_in_a_step_of_one_node():
    assert Place.from_environment(SLURM) == Place(job="12", attempt=0, node=2, num_nodes=4, is_slurm=True)
    assert Place.from_environment(SLURM | {"SLURM_RESTART_COUNT": "3"}).attempt == 3


def test_the_launcher_of_this_machine_comes_before_slurm():
    local = {"LAUNCH_NODE": "1", "LAUNCH_NODES": "2", "LAUNCH_JOB": "local-5", "LAUNCH_ATTEMPT": "1"}
    found = Place.from_environment(SLURM | local)
    assert found == Place(job="local-5", attempt=1, node=1, num_nodes=2, is_slurm=False)


def test_outside_of_both_there_is_a_remedy():
    with pytest.raises(ValueError, match="python -m launch"):
        Place.from_environment({})


def test_nodes_meet_whatever_their_order_and_ignore_older_attempts(tmp_path: Path):
    stale = Board(tmp_path, place(1, attempt=0))
    stale.put("node-1.json", {"host": "gone", "address": "10.0.0.9", "port": 1, "pid": 1})
    boards = [Board(tmp_path, place(node, attempt=1)) for node in (1, 0)]
    met: dict[int, dict] = {}
    threads = [threading.Thread(target=lambda b=b: met.update({b.place.node: b.join(100)})) for b in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert met[0] == met[1] and sorted(met[0]) == [0, 1]
    assert met[0][1].host != "gone" and met[0][0].port != met[0][1].port


def test_who_does_not_come_is_named_within_the_deadline(tmp_path: Path):
    with pytest.raises(PeersMissingError, match=r"node\(s\) 0, 2 of 3 did not come within \d+ s; here are 1 \("):
        Board(tmp_path, place(1, num_nodes=3)).join(0.2)


def test_a_number_that_was_used_before_is_refused(tmp_path: Path):
    Board(tmp_path, place(0, num_nodes=1)).join(1)
    with pytest.raises(FileExistsError, match=r"7\.0 was already used"):
        Board(tmp_path, place(0, num_nodes=1)).join(1)


def test_the_first_of_all_nodes_decides(tmp_path: Path):
    boards = [Board(tmp_path, place(node)) for node in (0, 1)]
    assert [board.put("failed.json", {"node": board.place.node}, once=True) for board in boards] == [True, False]
    assert boards[1].get("failed.json") == {"node": 0}
    assert boards[0].names() == {"failed.json"}


def test_a_link_whose_first_answer_was_lost_is_not_taken_for_somebody_elses(tmp_path: Path, monkeypatch):
    link = os.link

    def answered_twice(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    board = Board(tmp_path, place(0))
    monkeypatch.setattr(os, "link", answered_twice)
    assert board.put("failed.json", {"node": 0}, once=True)
    monkeypatch.undo()
    assert not board.put("failed.json", {"node": 1}, once=True) and board.get("failed.json") == {"node": 0}
    assert os.listdir(board.folder) == ["failed.json"]


def test_a_file_that_is_listed_but_not_there_yet_is_no_error(tmp_path: Path, monkeypatch):
    """On NFS: the listing is newer than what is known of the name."""
    board = Board(tmp_path, place(0))
    board.put("failed.json", {"node": 0})

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", stale)
        assert board.get("failed.json") is None and board.all("failed") == {}
    assert board.get("failed.json") == {"node": 0}


SLURM_PLACE = Place(job="7", attempt=0, node=1, num_nodes=2, is_slurm=True)


@pytest.mark.parametrize("origin", ["127.0.1.1", "not an address", None])
def test_a_host_that_knows_itself_by_loopback_gives_the_address_of_its_interface(origin, monkeypatch):
    """Debian's /etc/hosts; and srun on such a host says that it is at loopback."""
    monkeypatch.setattr(socket, "gethostbyname", {socket.gethostname(): "127.0.1.1", "node2": "127.0.1.1"}.__getitem__)
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    if origin is not None:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", origin)
    monkeypatch.setattr(peers, "interfaces", lambda: {"127.0.0.1": "lo", "10.9.8.7": "eth1", "10.9.8.6": "eth2"})
    assert peers.local_address(SLURM_PLACE) == "10.9.8.7"
    monkeypatch.setattr(peers, "interfaces", lambda: {"127.0.0.1": "lo"})
    with pytest.raises(OSError, match="no address but loopback"):
        peers.local_address(SLURM_PLACE)


def test_interfaces_are_those_that_the_system_lists():
    found = peers.interfaces()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}
    for address in found:
        with socket.socket() as probe:
            probe.bind((address, 0))  # its own, each of them

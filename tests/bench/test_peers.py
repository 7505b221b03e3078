"""Peers that are absent or broken are named in one line."""

from benchmarks.peers import why_absent


def test_the_reason_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise AttributeError('it is broken\\nby much')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_absent("json", "os.path") is None
    broken = "broken_peer cannot be imported: AttributeError: it is broken"
    assert why_absent("broken_peer") == broken
    assert why_absent("json", "no_peer.part", "no_other") == "no_peer and no_other not installed"
    assert why_absent("json.no_part").startswith("json.no_part cannot be imported: ModuleNotFound")

import pytest

from frame.core.interfaces.media import PlaceholderRun
from frame.entrypoints.media.media_service import PreparedMedia
from frame.entrypoints.media.placement import PlacementError, count_rows, make_media_texts, place_items
from frame.interfaces.modality import MediaLayout

IDS = {"<row>": 7, "<frame>": 8}


def item(expansion: str, *grids: tuple[int, int, int], row_token: str = "<row>") -> PreparedMedia:
    return PreparedMedia("image", b"d", MediaLayout(expansion, grids, 2.0, 5), "<image>", row_token, "path", [])


def place(ids: list[int], *items: PreparedMedia, order: list[int] | None = None) -> list[list[PlaceholderRun]]:
    placed = place_items(ids, items, list(range(len(items))) if order is None else order, IDS.get)
    assert all((each.digest, each.patches, each.path) == (b"d", 5, "path") for each in placed)
    return [each.runs for each in placed]


def test_runs_follow_the_order_of_the_prompt() -> None:
    one, two = item("<row>" * 4, (1, 2, 2)), item("a<row>b<row>")
    runs = place([1, 7, 2, 7, 7, 7, 7, 7, 3], one, two, order=[1, 0])
    assert runs == [[PlaceholderRun(1, 1, (0, 0, 0), 2.0), PlaceholderRun(3, 1, (0, 0, 0), 2.0)], [PlaceholderRun(4, 4, (1, 2, 2), 2.0)]]


def test_tokens_of_two_modalities() -> None:
    assert place([8, 8, 7], item("<frame><frame>", row_token="<frame>"), item("<row>")) == [
        [PlaceholderRun(0, 2, (0, 0, 0), 2.0)], [PlaceholderRun(2, 1, (0, 0, 0), 2.0)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "items"),
    [
        ([7, 7, 7], [item("<row><row>")]),  # one more
        ([7], [item("<row><row>")]),  # one fewer
        ([7, 1, 7], [item("<row><row>")]),  # split
        ([7, 7], [item("<row><row>", (1, 1, 3))]),  # a grid of other rows
        ([7, 7], [item("<row><row>", (1, 1, 1), (1, 1, 1))]),  # a grid too many
        ([9], [item("<other>", row_token="<other>")]),
    ],
)
def test_disagreement_is_an_error(ids: list[int], items: list[PreparedMedia]) -> None:
    with pytest.raises(PlacementError):
        place(ids, *items)


def test_texts_and_counts() -> None:
    one = item("a<row>b<row>")
    assert count_rows(one) == 2
    (text,) = make_media_texts([one])
    assert (text.modality, text.placeholder, text.row_token, text.expansion) == ("image", "<image>", "<row>", "a<row>b<row>")

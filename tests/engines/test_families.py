"""Every causal family of the installed Transformers: folded as the model computes, or refused by name before a token."""

import sys
from pathlib import Path

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import models_table

from families import FAMILIES, model_of, row_of

VERSION, PAGE = models_table.read()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_folded_or_refused_as_the_page_says(family, recwarn):
    if transformers.__version__ != VERSION:
        try:
            model_of(family)
        except Exception as error:
            pytest.skip(f"Transformers {transformers.__version__} does not make it: {error}")
    row = row_of(family)
    if row.refused:
        assert ("\n" not in row.refused and row.name in row.refused) or "=" in row.refused.split(":")[0]
    else:
        assert row.none < 1e-5
        assert row.folded == 0 or 0 < row.eight < 0.2
        assert row.folded or row.kept
    if transformers.__version__ == VERSION:
        assert not models_table.wrong(family, row, PAGE)


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of Transformers {VERSION}")
def test_the_page_has_these_families_and_no_others():
    assert list(PAGE) and set(PAGE) == set(FAMILIES)
    text = models_table.PAGE.read_text(encoding="utf-8")
    assert "crash" not in text.lower()

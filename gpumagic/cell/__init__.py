"""Run one `%%ongpu` cell: bring what it reads, place what it makes, measure, report."""

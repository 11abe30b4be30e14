"""Plotly figures from tables and tensors; no model."""

from microtome.figures.cosine_matrix import cosine_matrix as cosine_matrix
from microtome.figures.growth_curve import growth_curve as growth_curve
from microtome.figures.head_map import head_map as head_map
from microtome.figures.image import screenshot as screenshot
from microtome.figures.image import write_png as write_png
from microtome.figures.layer_curve import layer_curve as layer_curve
from microtome.figures.reliability import reliability_curve as reliability_curve
from microtome.figures.report import Section as Section
from microtome.figures.report import html_report as html_report
from microtome.figures.transfer_matrix import transfer_matrix as transfer_matrix

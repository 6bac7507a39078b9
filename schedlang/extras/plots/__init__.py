"""Plots of many executions: rows of numbers, drawn as SVG, PDF, PNG, a page, or by matplotlib."""

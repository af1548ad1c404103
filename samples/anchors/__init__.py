"""Functions that create the anchors and points of a feature map, and that choose a level of a feature pyramid for a
box.
"""

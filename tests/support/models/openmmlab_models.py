"""Detectors of OpenMMLab with the operators of the full models, but narrow layers and few proposals."""

BACKBONE = "model.backbone.base_channels=8"
PYRAMID = "model.neck.in_channels=[32,64,128,256]"
TWO_STAGES = (
    BACKBONE,
    PYRAMID,
    "model.roi_head.bbox_head.fc_out_channels=64",
    "model.test_cfg.rpn.max_per_img=100",
    "model.train_cfg.rpn_proposal.max_per_img=100",
    # with random weights no score passes the usual threshold, and NMS would get no boxes
    "model.test_cfg.rcnn.score_thr=0.012",
)
FASTER_RCNN, RETINANET = "faster-rcnn_r50_fpn_1x_coco.py", "retinanet_r50_fpn_1x_coco.py"
MASK_RCNN, DEFORMABLE_DETR = "mask-rcnn_r50_fpn_1x_coco.py", "deformable-detr_r50_16xb2-50e_coco.py"
NARROW = {
    FASTER_RCNN: TWO_STAGES,
    RETINANET: (BACKBONE, PYRAMID, "model.test_cfg.score_thr=0.0099"),
    MASK_RCNN: TWO_STAGES,
    DEFORMABLE_DETR: (
        BACKBONE,
        "model.neck.in_channels=[64,128,256]",
        "model.encoder.num_layers=2",
        "model.decoder.num_layers=2",
    ),
}

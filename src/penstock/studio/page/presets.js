// Settings to begin with. Where a paper draws a schedule, the sizes are those of its figure.
export const PRESETS = [
  ["From the papers", [
    ["GPipe, figure 2", { schedule: "gpipe", ranks: 4, chunks: 4 }],
    ["1F1B (Megatron-LM, figure 3)", { schedule: "1f1b", ranks: 4, chunks: 8 }],
    ["Interleaved 1F1B (Megatron-LM, figure 4)", { schedule: "interleaved", ranks: 4, chunks: 8, stages_per_rank: 2 }],
    ["Zero bubble, ZB-H1", { schedule: "zb-h1", ranks: 4, chunks: 8 }],
    ["Zero bubble, ZB-H2", { schedule: "zb-h2", ranks: 4, chunks: 8 }],
    ["Zero bubble, ZB-V", { schedule: "zb-v", ranks: 4, chunks: 8 }],
    ["Controllable memory, V-Half", { schedule: "v-half", ranks: 4, chunks: 8 }],
    ["Controllable memory, V-Min", { schedule: "v-min", ranks: 4, chunks: 8 }],
    ["DualPipeV, 4 ranks, 10 micro-batches", { schedule: "dualpipe-v", ranks: 4, chunks: 10 }],
    ["Breadth-first, 4 stages a rank", { schedule: "looped-bfs", ranks: 4, chunks: 8, stages_per_rank: 4 }],
  ]],
  ["Situations", [
    ["Slow links: eager 1F1B", { schedule: "eager-1f1b", ranks: 4, chunks: 8, send: 0.6 }],
    ["A heavy last stage: the head of an LLM", { schedule: "1f1b", ranks: 4, chunks: 8, profile: [1, 1, 1, 1.8] }],
    ["Half the memory: fit", { schedule: "fit", ranks: 4, chunks: 8, placement: "v", memory: 2 }],
    ["Recomputation under GPipe", { schedule: "gpipe", ranks: 4, chunks: 8, checkpoint: "always" }],
    ["A U-Net: skips across stages", { schedule: "1f1b", ranks: 4, chunks: 6, skips: [[0, 3], [1, 2]] }],
    ["Large: 64 ranks, 128 micro-batches", { schedule: "1f1b", ranks: 64, chunks: 128 }],
    ["Very large: 1,000 ranks, 64 micro-batches", { schedule: "1f1b", ranks: 1000, chunks: 64 }],
  ]],
];

'use strict';
// Figures are drawn as they come near the window, in the colours that the reader's system asks for.
const dark = matchMedia('(prefers-color-scheme: dark)');
const boxes = [...document.querySelectorAll('.figure')];
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d']};

function draw(box) {
  box.dataset.drawn = '1';
  const stored = box.querySelector(dark.matches ? '.dark' : '.light');
  const figure = JSON.parse(stored.textContent);
  const name = box.getAttribute('aria-label').toLowerCase().replace(/[^a-z0-9]+/g, '-').slice(0, 60);
  Plotly.react(box.querySelector('.plot'), figure.data, figure.layout, {...config, toImageButtonOptions: {filename: name, scale: 2}});
}

const watch = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    if (isIntersecting) {
      watch.unobserve(target);
      draw(target);
    }
  }
}, {rootMargin: '800px'});
boxes.forEach(box => watch.observe(box));
dark.addEventListener('change', () => boxes.filter(box => box.dataset.drawn).forEach(draw));
addEventListener('beforeprint', () => boxes.forEach(draw));

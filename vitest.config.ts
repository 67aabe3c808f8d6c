import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['js/test/**/*.test.ts'],
    restoreMocks: true,
    unstubGlobals: true,
  },
});
